"""Attention, and what stores keys and values, at the shapes of the 27B preset on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dflash_graph.ops import get_op
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    BF16_REDUCTION,
    EXACT,
    F32_REDUCTION,
    poison_,
    same_bytes,
)

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Tensor]]
Case = dict[str, Tensor]
PAGE_SIZE = 64
GATED = {"q_heads": 24, "kv_heads": 4, "head_dim": 256}
DEMO = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
TOLERANCE = {torch.bfloat16: BF16_REDUCTION, torch.float32: F32_REDUCTION}


def normal(rng: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng).to(dtype).cuda()


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).cuda()


def pages_of(
    rng: torch.Generator, dtype: torch.dtype, ends: Sequence[int], heads: int, dim: int
) -> Case:
    """Pools and a table that hold positions before each row's end, and NaN elsewhere."""
    needed = [-(-end // PAGE_SIZE) for end in ends]
    order = torch.randperm(sum(needed) + 2, generator=rng).tolist()
    pools = [normal(rng, dtype, len(order), heads, PAGE_SIZE, dim) for _ in range(2)]
    table = torch.full((len(ends), max(needed) + 1), -1, dtype=torch.int32)
    for b, end in enumerate(ends):
        for place in range(needed[b]):
            table[b, place] = page = order.pop()
            for pool in pools:
                poison_(pool[page, :, max(0, end - place * PAGE_SIZE) :])
    for page in order:
        for pool in pools:
            poison_(pool[page])
    return {"k_pages": pools[0], "v_pages": pools[1], "page_table": table.cuda()}


def rows_of(case: Case, cut: Callable[[Tensor], Tensor]) -> Case:
    """A case with every argument but state cut to some of its rows."""
    state = ("_pages", "_ring")
    return {n: v if n.endswith(state) else cut(v).contiguous() for n, v in case.items()}


def gated_case(
    rng: torch.Generator,
    dtype: torch.dtype,
    starts: Sequence[int],
    lives: Sequence[int],
    columns: int,
    heads: dict[str, int],
) -> Case:
    n, g, d = heads.values()
    ends = [s + c if c else 0 for s, c in zip(starts, lives, strict=True)]
    case = {
        "q": normal(rng, dtype, len(starts), columns, n, d) * 2.0,
        **pages_of(rng, dtype, ends, g, d),
        "start": ints(starts),
        "live": ints(lives),
        "qkv": normal(rng, dtype, len(starts), columns, (2 * n + 2 * g) * d),
    }
    for b, live in enumerate(lives):
        poison_(case["q"][b, live:])
        poison_(case["qkv"][b, live:])
    return case


@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.bfloat16, GATED), (torch.bfloat16, DEMO), (torch.float32, DEMO)]
)
def test_gated_attention(
    rng: torch.Generator, run: Run, check: Run, dtype: torch.dtype, heads: dict[str, int]
) -> None:
    """The formula, and a column's bits in blocks of any width, with any company.

    Two blocks cross the end of a page, so that their first columns do not see the last one.
    """
    op, starts, lives = get_op("gated_attention"), [2041, 777, -1, 5050], [16, 9, 0, 16]
    case = gated_case(rng, dtype, starts, lives, 16, heads)
    whole = check(op, case, heads, TOLERANCE[dtype])["y"]
    assert not whole[1, 9:].any() and not whole[2].any()
    assert same_bytes(run(op, rows_of(case, lambda v: v.flip(0)), heads)["y"].flip(0), whole)
    for b in (0, 1, 3):
        row = rows_of(case, lambda v, b=b: v[b : b + 1])
        for count in (1, 2, 5, 8, 9, 11):
            if count <= lives[b]:
                cut = {n: row[n][:, :count].contiguous() for n in ("q", "qkv")}
                short = run(op, {**row, **cut, "live": ints([count])}, heads)["y"]
                assert same_bytes(short[0], whole[b, :count]), f"row {b} of {count} columns"
        for i in (0, 3, lives[b] - 1):
            cut = {n: row[n][:, i : i + 1].contiguous() for n in ("q", "qkv")}
            cut |= {"start": row["start"] + i, "live": ints([1])}
            alone = run(op, {**row, **cut}, heads)["y"]
            assert same_bytes(alone[0, 0], whole[b, i]), f"row {b}, column {i} alone"


def test_gated_attention_at_every_start(rng: torch.Generator, run: Run, check: Run) -> None:
    """Starts about the ends of pages and of a round of workers; eight requests."""
    op = get_op("gated_attention")
    starts = [0, 1, 56, 57, 63, 64, 2040, 2047]
    case = gated_case(rng, torch.bfloat16, starts, [8] * 8, 8, GATED)
    whole = check(op, case, GATED, BF16_REDUCTION)["y"]
    for b in range(8):
        row = rows_of(case, lambda v, b=b: v[b : b + 1])
        assert same_bytes(run(op, row, GATED)["y"], whole[b : b + 1]), f"start {starts[b]}"


def block_case(
    rng: torch.Generator,
    name: str,
    dtype: torch.dtype,
    frontiers: Sequence[int],
    lives: Sequence[int],
    heads: tuple[int, int, int],
    window: int,
) -> Case:
    (n, g, d), batch, columns = heads, len(lives), 16
    case = {
        "q": normal(rng, dtype, batch, columns, n, d) * 2.0,
        "k": normal(rng, dtype, batch, columns, g, d),
        "v": normal(rng, dtype, batch, columns, g, d),
        "frontier": ints(frontiers),
        "live": ints(lives),
    }
    for b, live in enumerate(lives):
        for argument in ("q", "k", "v"):
            poison_(case[argument][b, live:])
    if name.startswith("paged"):
        case |= pages_of(rng, dtype, frontiers, g, d)
    else:
        slots = torch.randperm(batch + 1, generator=rng)[:batch].tolist()
        case |= {n: normal(rng, dtype, batch + 1, window, g, d) for n in ("k_ring", "v_ring")}
        case["slots"] = ints(slots)
        for slot, frontier in zip(slots, frontiers, strict=True):
            for ring in ("k_ring", "v_ring"):
                poison_(case[ring][slot, frontier:])
    return {argument: case[argument] for argument in get_op(name).inputs}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["ring_block_attention", "paged_block_attention"])
@pytest.mark.parametrize(
    ("dtype", "heads", "window"),
    [
        (torch.bfloat16, (32, 8, 128), 2048),
        (torch.bfloat16, (4, 2, 64), 128),
        (torch.float32, (4, 2, 64), 128),
    ],
)
def test_block_attention(
    rng: torch.Generator,
    run: Run,
    check: Run,
    name: str,
    causal: bool,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int,
) -> None:
    op, how, lives = get_op(name), {"causal": causal}, [16, 8, 0, 16, 1]
    case = block_case(rng, name, dtype, [2048, 5003, 100, 0, 77], lives, heads, window)
    whole = check(op, case, how, TOLERANCE[dtype])["o"]
    assert not whole[1, 8:].any() and not whole[2].any()
    assert same_bytes(run(op, rows_of(case, lambda v: v.flip(0)), how)["o"].flip(0), whole)
    for b in (0, 1, 3, 4):
        row = rows_of(case, lambda v, b=b: v[b : b + 1])
        # Dead columns may be there or not; later columns too, if the block is causal.
        for count in {lives[b]} | ({1, 5, 8} if causal else set()):
            if count <= lives[b]:
                cut = {n: row[n][:, :count].contiguous() for n in ("q", "k", "v")}
                short = run(op, {**row, **cut, "live": ints([count])}, how)["o"]
                assert same_bytes(short[0], whole[b, :count]), f"row {b} of {count} columns"


def test_rope_append(rng: torch.Generator, run: Run, check: Run) -> None:
    """The formula, the bits of the two ops that it stands for, and a column's bits alone."""
    op, head_norm_rope, append_kv = map(get_op, ("rope_append", "head_norm_rope", "append_kv"))
    lives, dtype = [16, 8, 0, 1], torch.bfloat16
    angle = torch.randn(4, 16, 32, generator=rng).cuda()
    case = {
        "qkv": normal(rng, dtype, 4, 16, 14336),
        "q_norm": normal(rng, dtype, 256),
        "k_norm": normal(rng, dtype, 256),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "k_pages": normal(rng, dtype, 12, 4, PAGE_SIZE, 256),
        "v_pages": normal(rng, dtype, 12, 4, PAGE_SIZE, 256),
        "page_table": torch.randperm(12, generator=rng).view(4, 3).int().cuda(),
        "start": ints([60, 64, 5, 191]),
        "live": ints(lives),
    }
    heads = {"query_parts": 2, **GATED, "rotary_half": 32, "eps": 1e-6, "offset": True}
    whole = check(op, case, heads, BF16_ELEMENTWISE)
    parts = run(head_norm_rope, {n: case[n] for n in head_norm_rope.inputs}, heads)
    assert same_bytes(whole["q"], parts.pop("q"))
    stored = {**{n: case[n] for n in append_kv.inputs if n not in parts}, **parts}
    for name, pool in run(append_kv, {n: stored[n] for n in append_kv.inputs}, {}).items():
        assert same_bytes(whole[name], pool), name
    for b, live in enumerate(lives):
        row = rows_of(case, lambda v, b=b: v[b : b + 1] if len(v) == 4 else v)
        found = run(op, row, heads)
        assert same_bytes(found["q"], whole["q"][b : b + 1])
        for i in range(live):
            page, place = divmod(int(case["start"][b]) + i, PAGE_SIZE)
            at = (int(case["page_table"][b, page]), slice(None), place)
            for name in ("k_pages", "v_pages"):
                assert same_bytes(found[name][at], whole[name][at])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_append(rng: torch.Generator, check: Run, dtype: torch.dtype) -> None:
    """Pages, to the byte."""
    for columns, lives in ((16, [16, 8, 0, 1]), (300, [300, 131, 0, 7])):
        block = {n: normal(rng, dtype, 4, columns, 8, 128) for n in ("k", "v")}
        place = {"start": ints([2040, 63, 5, 0]), "live": ints(lives)}
        pools = {n: normal(rng, dtype, 160, 8, PAGE_SIZE, 128) for n in ("k_pages", "v_pages")}
        table = torch.randperm(160, generator=rng).view(4, 40).int().cuda()
        check(get_op("append_kv"), {**block, **pools, "page_table": table, **place}, {}, EXACT)
