from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import paged_block_attention
from dflash_graph.ops.paged_block_attention import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    INTEGER_POISON,
    check_op,
    poison_,
)

TOLERANCE = {torch.float32: F32_REDUCTION, torch.bfloat16: BF16_REDUCTION}
POOLS = ("k_pages", "v_pages")


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps of context from short sequences."""
    monkeypatch.setattr(paged_block_attention, "STEP", 8)


def paged_case(
    rng: torch.Generator,
    dtype: torch.dtype,
    *,
    frontier: list[int],
    live: list[int],
    columns: int = 8,
    page_size: int = 4,
    heads: int = 4,
    groups: int = 2,
    width: int = 16,
) -> dict[str, Tensor]:
    """Arguments with NaN wherever the op must not look, and impossible pages past the context."""
    batch = len(frontier)
    needed = [-(-f // page_size) for f in frontier]
    free = torch.randperm(sum(needed) + 3, generator=rng).tolist()

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    case = {
        "q": draw(batch, columns, heads, width) * 3,
        "k": draw(batch, columns, groups, width),
        "v": draw(batch, columns, groups, width),
        "k_pages": poison_(draw(len(free), groups, page_size, width)),
        "v_pages": poison_(draw(len(free), groups, page_size, width)),
        "page_table": torch.full((batch, max(needed) + 1), INTEGER_POISON, dtype=torch.int32),
        "frontier": torch.tensor(frontier, dtype=torch.int32),
        "live": torch.tensor(live, dtype=torch.int32),
    }
    for b in range(batch):
        for index in range(needed[b]):
            page = case["page_table"][b, index] = free.pop()
            filled = min(page_size, frontier[b] - index * page_size)
            for pool in POOLS:
                case[pool][page, :, :filled] = draw(groups, filled, width)
        for name in ("q", "k", "v"):
            poison_(case[name][b, live[b] :])
    return case


def oracle(case: dict[str, Tensor], causal: bool) -> Tensor:
    """Dense attention per request, head and query over a gathered context."""
    q = case["q"].double()
    batch, columns, heads, width = q.shape
    groups, page_size = case["k_pages"].shape[1:3]
    out = torch.zeros(batch, columns, heads, width, dtype=torch.float64)
    for b in range(batch):
        first, live = int(case["frontier"][b]), int(case["live"][b])
        k, v = (
            torch.stack(
                [
                    case[pool][case["page_table"][b, p // page_size], :, p % page_size]
                    for p in range(first)
                ]
                + list(case[own][b, :live])
            ).double()
            for pool, own in zip(POOLS, "kv", strict=True)
        )
        for i in range(live):
            seen = first + (i + 1 if causal else live)
            for h in range(heads):
                g = h // (heads // groups)
                weights = (k[:seen, g] @ q[b, i, h] / width**0.5).softmax(0)
                out[b, i, h] = weights @ v[:seen, g]
    return out.flatten(2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_against_gathered_attention(rng: torch.Generator, dtype: torch.dtype, causal: bool) -> None:
    case = paged_case(rng, dtype, frontier=[37, 0, 5], live=[8, 3, 1])
    check_op(OP, case, {"causal": causal}, TOLERANCE[dtype], oracle={"o": oracle(case, causal)})


@pytest.mark.parametrize("columns", [1, 2, 5, 8, 16])
def test_widths_and_page_boundaries(rng: torch.Generator, columns: int) -> None:
    for frontier, page_size in ((0, 4), (7, 8), (8, 8), (9, 8), (23, 3), (30, 16), (3, 1)):
        case = paged_case(
            rng,
            torch.float32,
            frontier=[frontier],
            live=[columns],
            columns=columns,
            page_size=page_size,
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


def test_the_step_in_use(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = paged_case(rng, torch.float32, frontier=[300, 17], live=[8, 8], page_size=16)
    check_op(
        OP, case, {"causal": False}, F32_REDUCTION, opcheck=False, oracle={"o": oracle(case, False)}
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_do_not_depend_on_company(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Nor on how long the longest of the company is."""
    case = paged_case(rng, dtype, frontier=[61, 4, 12], live=[8, 5, 1])
    whole = OP.reference(**case, causal=False)
    order = torch.tensor([2, 0, 1])
    moved = {n: v if n in POOLS else v[order] for n, v in case.items()}
    assert torch.equal(OP.reference(**moved, causal=False), whole[order])
    for b in range(3):
        alone = {n: v if n in POOLS else v[b : b + 1] for n, v in case.items()}
        assert torch.equal(OP.reference(**alone, causal=False), whole[b : b + 1])
        live = int(case["live"][b])
        short = {n: v[:, :live] if n in ("q", "k", "v") else v for n, v in alone.items()}
        assert torch.equal(OP.reference(**short, causal=False), whole[b : b + 1, :live])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_causal_bits_do_not_depend_on_later_columns(
    rng: torch.Generator, dtype: torch.dtype
) -> None:
    case = paged_case(rng, dtype, frontier=[20], live=[16], columns=16)
    whole = OP.reference(**case, causal=True)
    for columns in (1, 5, 8, 9):
        short = {n: v[:, :columns] if n in ("q", "k", "v") else v for n, v in case.items()}
        short["live"] = torch.tensor([columns], dtype=torch.int32)
        assert torch.equal(OP.reference(**short, causal=True), whole[:, :columns])


def test_dead_columns_are_zero(rng: torch.Generator) -> None:
    case = paged_case(rng, torch.bfloat16, frontier=[20, 3], live=[2, 0])
    out = OP(**case, causal=False)
    assert torch.isfinite(out).all() and not out[0, 2:].any() and not out[1].any()


def test_contract(rng: torch.Generator) -> None:
    case = paged_case(rng, torch.bfloat16, frontier=[9], live=[8])
    specs = {n: spec_of(v) for n, v in case.items()}
    with pytest.raises(ShapeError, match="4 q heads do not divide among 3 kv heads"):
        OP.infer(
            specs
            | {n: spec_of(torch.empty(1, 8, 3, 16, dtype=torch.bfloat16)) for n in ("k", "v")}
            | {n: spec_of(torch.empty(5, 3, 4, 16, dtype=torch.bfloat16)) for n in POOLS},
            {"causal": False},
        )
    cost = OP.cost(specs, {"causal": False}, context=9)
    assert cost.flops == 4 * 4 * 16 * (8 * 9 + 64)
    assert OP.cost(specs, {"causal": True}, context=9).flops == 4 * 4 * 16 * (8 * 9 + 36)
    block = 8 * (4 + 2 + 2) * 16
    assert cost.read_bytes == 2 * (block + 2 * 9 * 2 * 16) + 4 * (3 + 2)
    assert cost.write_bytes == 2 * 8 * 64
