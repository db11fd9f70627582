from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.ring_block_attention import OP
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, check_op, poison_

TOLERANCE = {torch.float32: F32_REDUCTION, torch.bfloat16: BF16_REDUCTION}


def ring_case(
    rng: torch.Generator,
    dtype: torch.dtype,
    *,
    frontier: list[int],
    live: list[int],
    columns: int = 8,
    window: int = 12,
    heads: int = 4,
    groups: int = 2,
    width: int = 16,
) -> dict[str, Tensor]:
    """Arguments with NaN wherever the op must not look."""
    batch = len(frontier)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    case = {
        "q": draw(batch, columns, heads, width) * 3,
        "k": draw(batch, columns, groups, width),
        "v": draw(batch, columns, groups, width),
        "k_ring": poison_(draw(batch + 2, window, groups, width)),
        "v_ring": poison_(draw(batch + 2, window, groups, width)),
        "slots": (torch.randperm(batch + 2, generator=rng)[:batch]).to(torch.int32),
        "frontier": torch.tensor(frontier, dtype=torch.int32),
        "live": torch.tensor(live, dtype=torch.int32),
    }
    for b in range(batch):
        for position in range(max(0, frontier[b] - window), frontier[b]):
            for ring in ("k_ring", "v_ring"):
                case[ring][case["slots"][b], position % window] = draw(groups, width)
        for name in ("q", "k", "v"):
            poison_(case[name][b, live[b] :])
    return case


def oracle(case: dict[str, Tensor], causal: bool) -> Tensor:
    """One query, one head and one key at a time, from positions."""
    q = case["q"].double()
    batch, columns, heads, width = q.shape
    window, groups = case["k_ring"].shape[1:3]
    out = torch.zeros(batch, columns, heads, width, dtype=torch.float64)
    for b in range(batch):
        first = int(case["frontier"][b])
        keys = {}
        for position in range(max(0, first - window), first):
            place = (int(case["slots"][b]), position % window)
            keys[position] = (case["k_ring"][place].double(), case["v_ring"][place].double())
        for j in range(int(case["live"][b])):
            keys[first + j] = (case["k"][b, j].double(), case["v"][b, j].double())
        for i in range(int(case["live"][b])):
            seen = [
                p for p in keys if abs(p - first - i) < window and (p <= first + i or not causal)
            ]
            for h in range(heads):
                g = h // (heads // groups)
                weights = torch.stack([q[b, i, h] @ keys[p][0][g] for p in seen]) / width**0.5
                values = torch.stack([keys[p][1][g] for p in seen])
                out[b, i, h] = weights.softmax(0) @ values
    return out.flatten(2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_against_gathered_attention(rng: torch.Generator, dtype: torch.dtype, causal: bool) -> None:
    case = ring_case(rng, dtype, frontier=[40, 0, 5], live=[8, 3, 1])
    check_op(OP, case, {"causal": causal}, TOLERANCE[dtype], oracle={"o": oracle(case, causal)})


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
def test_widths(rng: torch.Generator, columns: int) -> None:
    """Also blocks longer than the window, where a column does not see the whole block."""
    for frontier, window in ((30, 6), (6, 6), (5, 6), (7, 6), (1, 1), (3, 20)):
        case = ring_case(
            rng,
            torch.float32,
            frontier=[frontier],
            live=[columns],
            columns=columns,
            window=window,
            heads=6,
            groups=2,
            width=10,
        )
        for causal in (False, True):
            check_op(
                OP,
                case,
                {"causal": causal},
                F32_REDUCTION,
                opcheck=False,
                oracle={"o": oracle(case, causal)},
            )


def test_distance_window_is_out_and_one_less_is_in(rng: torch.Generator) -> None:
    """Values are one-hot by position, scores are equal: the result shows who is seen."""
    window, frontier = 4, 9
    case = ring_case(
        rng,
        torch.float32,
        frontier=[frontier],
        live=[3],
        columns=3,
        window=window,
        heads=1,
        groups=1,
        width=16,
    )
    case["q"].zero_()
    for position in range(frontier - window, frontier):
        hot = torch.eye(16)[position]
        case["v_ring"][case["slots"][0], position % window, 0] = hot
    case["v"][0, :, 0] = torch.eye(16)[frontier : frontier + 3]
    for causal, seen in (
        (False, [range(6, 12), range(7, 12), range(8, 12)]),
        (True, [range(6, 10), range(7, 11), range(8, 12)]),
    ):
        out = OP(**case, causal=causal)[0]
        assert [row.nonzero().flatten().tolist() for row in out] == [list(s) for s in seen]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    case = ring_case(rng, dtype, frontier=[33, 4, 12], live=[8, 5, 1])
    whole = OP.reference(**case, causal=False)
    order = torch.tensor([2, 0, 1])
    moved = {n: v if n.endswith("ring") else v[order] for n, v in case.items()}
    assert torch.equal(OP.reference(**moved, causal=False), whole[order])
    for b in range(3):
        alone = {n: v if n.endswith("ring") else v[b : b + 1] for n, v in case.items()}
        assert torch.equal(OP.reference(**alone, causal=False), whole[b : b + 1])
        # Dead columns may be there or not.
        live = int(case["live"][b])
        short = {n: v[:, :live] if n in ("q", "k", "v") else v for n, v in alone.items()}
        assert torch.equal(OP.reference(**short, causal=False), whole[b : b + 1, :live])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_causal_bits_do_not_depend_on_later_columns(
    rng: torch.Generator, dtype: torch.dtype
) -> None:
    case = ring_case(rng, dtype, frontier=[20], live=[16], columns=16)
    whole = OP.reference(**case, causal=True)
    for columns in (1, 5, 8, 9):
        short = {n: v[:, :columns] if n in ("q", "k", "v") else v for n, v in case.items()}
        short["live"] = torch.tensor([columns], dtype=torch.int32)
        assert torch.equal(OP.reference(**short, causal=True), whole[:, :columns])


def test_dead_columns_are_zero_and_large_scores_stay_finite(rng: torch.Generator) -> None:
    case = ring_case(rng, torch.float32, frontier=[50], live=[4])
    case["q"] *= 1e18
    case["k"] *= 1e18
    out = OP(**case, causal=False)
    assert torch.isfinite(out).all() and not out[:, 4:].any() and out[:, :4].any()


def test_contract(rng: torch.Generator) -> None:
    specs = {
        n: spec_of(v)
        for n, v in ring_case(rng, torch.float32, frontier=[9], live=[8], window=4).items()
    }
    with pytest.raises(ShapeError, match="4 q heads do not divide among 3 kv heads"):
        three = {
            n: spec_of(torch.empty([3 if i == 2 else s for i, s in enumerate(v.shape)]))
            if n in ("k", "v", "k_ring", "v_ring")
            else v
            for n, v in specs.items()
        }
        OP.infer(three, {"causal": False})
    # window 4, W 8: context 3+2+1, block pairs at distance 0..3: 8 + 2*(7+6+5)
    cost = OP.cost(specs, {"causal": False}, context=9)
    assert cost.flops == 4 * 4 * 16 * (6 + 44)
    assert OP.cost(specs, {"causal": True}, context=9).flops == 4 * 4 * 16 * (6 + 26)
    assert OP.cost(specs, {"causal": True}, context=2).flops == 4 * 4 * 16 * (2 + 2 + 1 + 26)
    block = 8 * (4 + 2 + 2) * 16
    assert cost.read_bytes == 4 * (block + 2 * 3 * 2 * 16 + 3)
    assert cost.write_bytes == 4 * 8 * 64
