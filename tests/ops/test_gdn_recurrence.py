from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_fold import OP as FOLD
from dflash_graph.ops.gdn_recurrence import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, check_op, same_bytes

SLOTS = 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "lives", "width"),
    [([3], [1], 1), ([0], [8], 8), ([4, 1, 2], [2, 0, 5], 5), ([2, 0, 3], [16, 9, 1], 16)],
)
def test_matches_formula(gdn, rng, dtype, slots, lives, width):
    arguments = gdn.case(rng, dtype, slots, lives, width, counted="live")
    oracle = {"y": gdn.formula(arguments)["y"]}
    found = check_op(OP, arguments, {}, F32_REDUCTION, oracle=oracle, opcheck=False)["y"]
    for b, live in enumerate(lives):
        assert not found[b, live:].any()


def test_hand_worked():
    # One head of width 2 and 1, k and q long enough for eps to vanish: S = [4, 0], decay 1/2.
    def row(*values):
        return torch.tensor(values).view(1, 1, 1, -1)

    arguments = {
        "q": row(0.0, 2.0**20),
        "k": row(2.0**20, 0.0),
        "v": row(10.0),
        "beta": torch.full((1, 1, 1), 0.5),
        "g": torch.full((1, 1, 1), 0.5).log(),
        "state": torch.tensor([[[[4.0, 6.0]]]]),
        "slots": torch.zeros(1, dtype=torch.int32),
        "live": torch.ones(1, dtype=torch.int32),
    }
    # S -> [2, 3]; u = (10 - 2) / 2 = 4; S -> [6, 3].
    assert_matches(OP.reference(**arguments), row(3.0 / 2**0.5), F32_REDUCTION)
    arguments["q"] = arguments["k"]
    assert_matches(OP.reference(**arguments), row(6.0 / 2**0.5), F32_REDUCTION)


def test_registration(gdn, rng):
    # opcheck compares arguments before and after, so nothing is NaN here.
    arguments = gdn.case(rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3, counted="live")
    check_op(OP, arguments, {}, F32_REDUCTION)


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [(2, 4, 10, 6), (1, 1, 64, 64), (2, 4, 64, 64), (1, 3, 7, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant(gdn, rng, dtype, key_heads, heads, key_dim, value_dim):
    how = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    lives = [16, 0, 11]
    arguments = gdn.case(rng, dtype, [4, 1, 2], lives, 16, **how, counted="live")
    whole = OP.reference(**arguments)
    for b, live in enumerate(lives):
        row = {n: v if n == "state" else v[b : b + 1].clone() for n, v in arguments.items()}
        assert same_bytes(OP.reference(**row)[0], whole[b])
        for cut in {1, live // 2 + 1}:
            block = {n: v[:, :cut] if v.ndim > 2 and n != "state" else v for n, v in row.items()}
            block["live"] = row["live"].clamp(max=cut)
            assert same_bytes(OP.reference(**block)[0], whole[b, :cut])
        state = arguments["state"].clone()
        for i in range(live):  # as plain decoding: one column, then fold it
            one = {n: v[:, i : i + 1] for n, v in row.items() if v.ndim > 2 and n != "state"}
            one |= {"state": state, "slots": row["slots"], "live": torch.ones_like(row["live"])}
            assert same_bytes(OP.reference(**one)[0, 0], whole[b, i])
            records = {n: v for n, v in one.items() if n not in ("q", "live")}
            FOLD.reference(**records, committed=one["live"])
    turned = {n: v if n == "state" else v.flip(0) for n, v in arguments.items()}
    assert same_bytes(OP.reference(**turned).flip(0), whole)


def test_cost_and_contract(gdn, rng):
    arguments = gdn.case(rng, torch.bfloat16, [0, 1], [3, 3], 3, counted="live")
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {})
    columns = 2 * 3
    assert cost.read_bytes == (
        2 * columns * (2 * 20 + 24) + 4 * columns * 8 + 4 * 2 * 4 * 60 + 4 * 4
    )
    assert cost.write_bytes == 4 * columns * 24
    # Two norms per key head; exp, decay, S k, u, beta k, u k^T, S q and the scale per value head.
    head = 2 + 60 + 120 + 12 + 120 + 120 + 6
    assert cost.flops == columns * (2 * 2 * 32 + 4 * head)
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, **{n: torch.zeros(2, 3, 3, 10).bfloat16() for n in "qk"}})
    with pytest.raises(ShapeError, match=r"gdn_recurrence\.state: expected dtype float32"):
        OP(**{**arguments, "state": arguments["state"].bfloat16()})
