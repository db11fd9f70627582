from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_fold import OP as FOLD
from dflash_graph.ops.gdn_recurrence import OP as RECURRENCE
from dflash_graph.ops.gdn_scan import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, check_op, poison_, same_bytes

COUNTS = "live"
SLOTS = 5


def case(rng, dtype, slots, counts, width, *, key_heads=2, heads=4, key_dim=10, value_dim=6):
    """A block whose columns at or after a row's count, and whose other slots, are NaN."""
    batch = len(slots)

    def random(*shape):
        return torch.randn(shape, generator=rng)

    state = poison_(torch.empty(SLOTS, heads, value_dim, key_dim))
    state[slots] = random(batch, heads, value_dim, key_dim)
    block = {
        "q": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "k": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "v": random(batch, width, heads, value_dim).to(dtype),
        "beta": torch.rand(batch, width, heads, generator=rng),
        "g": -torch.rand(batch, width, heads, generator=rng) * 3.0,
    }
    if counts[0] > 1:
        block["k"][0, 0, 0] = 0.0
        block["g"][0, 1] = torch.tensor([0.0, -200.0] * heads)[:heads]
        block["beta"][0, 1] = torch.tensor([1.0, 0.0] * heads)[:heads]
    for b, count in enumerate(counts):
        for value in block.values():
            poison_(value[b, count:])
    return {
        **block,
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32),
        COUNTS: torch.tensor(counts, dtype=torch.int32),
    }


def formula(arguments):
    """Outputs and states token by token and head by head, in float64."""
    q, k, v, beta, g = (arguments[n].double() for n in ("q", "k", "v", "beta", "g"))
    state = arguments["state"].double().clone()
    batch, width, heads, value_dim = v.shape
    group = heads // k.shape[2]
    y = torch.zeros(batch, width, heads, value_dim, dtype=torch.float64)
    rows = zip(arguments["slots"].tolist(), arguments[COUNTS].tolist(), strict=True)
    for b, (slot, count) in enumerate(rows):
        for h in range(heads):
            s = state[slot, h]
            for i in range(count):
                key, query = k[b, i, h // group], q[b, i, h // group]
                key = key / (key @ key + 1e-6) ** 0.5
                query = query / (query @ query + 1e-6) ** 0.5
                s = g[b, i, h].exp() * s
                s = s + torch.outer(beta[b, i, h] * (v[b, i, h] - s @ key), key)
                y[b, i, h] = s @ query / len(query) ** 0.5
            state[slot, h] = s
    return {"y": y, "state": state}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "lives", "width"),
    [([3], [1], 1), ([4, 1, 2], [2, 0, 5], 5), ([2, 0, 3], [40, 9, 33], 40)],
)
def test_matches_formula(rng, dtype, slots, lives, width):
    arguments = case(rng, dtype, slots, lives, width)
    oracle, before = formula(arguments), arguments["state"].clone()
    y = OP(**arguments)
    assert_matches(y, oracle["y"], F32_REDUCTION)
    for slot in range(SLOTS):
        if slot in slots and lives[slots.index(slot)]:
            assert_matches(arguments["state"][slot], oracle["state"][slot], F32_REDUCTION)
        else:
            assert same_bytes(arguments["state"][slot], before[slot])


def test_registration(rng):
    arguments = case(rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3)
    check_op(OP, arguments, {}, F32_REDUCTION, oracle=formula(arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bits_of_recurrence_and_fold(rng, dtype):
    arguments = case(rng, dtype, [4, 1, 2], [13, 0, 8], 13)
    folded = arguments["state"].clone()
    expected = RECURRENCE.reference(**arguments)
    rest = {n: v for n, v in arguments.items() if n not in ("q", "state", "live")}
    FOLD.reference(**rest, state=folded, committed=arguments["live"])
    assert same_bytes(OP.reference(**arguments), expected)
    assert same_bytes(arguments["state"], folded)


@pytest.mark.parametrize("cuts", [(1, 12), (5, 8), (4, 4, 5)])
def test_cut_anywhere(rng, cuts):
    whole = case(rng, torch.bfloat16, [3], [13], 13)
    parts = {name: value.clone() for name, value in whole.items()}
    expected, found, start = OP.reference(**whole), [], 0
    for cut in cuts:
        block = {
            n: v[:, start : start + cut] if n in ("q", "k", "v", "beta", "g") else v
            for n, v in parts.items()
        }
        found.append(OP.reference(**{**block, "live": torch.tensor([cut], dtype=torch.int32)}))
        start += cut
    assert same_bytes(torch.cat(found, dim=1), expected)
    assert same_bytes(parts["state"], whole["state"])


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [0, 1], [3, 3], 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost, without = OP.cost(specs, {}), RECURRENCE.cost(specs, {})
    assert (cost.read_bytes, cost.flops) == (without.read_bytes, without.flops)
    assert cost.write_bytes == without.write_bytes + 4 * 2 * 4 * 60
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, **{n: torch.zeros(2, 3, 3, 10).bfloat16() for n in "qk"}})
