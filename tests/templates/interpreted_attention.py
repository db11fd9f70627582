"""Attention, and what stores keys and values, at small geometry in Triton's interpreter.

See `interpreted.py`. Whatever a kernel must not look at is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_graph.kernels import Choice
from dflash_graph.ops import get_op
from dflash_graph.testing import EXACT, F32_REDUCTION, Tolerance, poison_, same_bytes

#: One bfloat16 cut (2^-7 relative), as the interpreter makes.
BF16_CUT = Tolerance(1e-6, 8e-3, 8e-3)
DTYPES = [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_CUT)]
GATED = get_op("gated_attention")
#: Four workers, and at most five columns of three heads a program.
SMALL = Choice({"WORKERS": 4, "ROWS": 16, "BLOCK_D": 32, "BLOCK_P": 16, "BLOCK_C": 16})


def normal(rng, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def pages_of(rng, ends, *, heads, page_size, dim):
    """Pools and a table that hold positions before each row's end, and NaN elsewhere."""
    needed = [-(-end // page_size) for end in ends]
    order = torch.randperm(sum(needed) + 2, generator=rng).tolist()
    pools = [poison_(torch.empty(len(order), heads, page_size, dim)) for _ in range(2)]
    table = torch.full((len(ends), max(needed) + 1), -1, dtype=torch.int32)
    for b, end in enumerate(ends):
        for place in range(needed[b]):
            table[b, place] = page = order.pop()
            count = min(page_size, end - place * page_size)
            for pool in pools:
                pool[page, :, :count] = normal(rng, heads, count, dim)
    return pools, table


def gated_case(rng, starts, lives, columns, *, heads=6, kv_heads=2, page_size=4, dim=20):
    ends = [s + n if n else 0 for s, n in zip(starts, lives, strict=True)]
    pools, table = pages_of(rng, ends, heads=kv_heads, page_size=page_size, dim=dim)
    case = {
        "q": normal(rng, len(starts), columns, heads, dim),
        "k_pages": pools[0],
        "v_pages": pools[1],
        "page_table": table,
        "start": ints(starts),
        "live": ints(lives),
        "qkv": normal(rng, len(starts), columns, (2 * heads + 2 * kv_heads) * dim, scale=4.0),
    }
    for b, live in enumerate(lives):
        poison_(case["q"][b, live:])
        poison_(case["qkv"][b, live:])
    return case, {"q_heads": heads, "kv_heads": kv_heads, "head_dim": dim}


@pytest.mark.parametrize(
    ("starts", "lives", "columns"),
    [([0], [1], 1), ([3], [2], 2), ([13, -1, 5], [5, 0, 2], 5), ([30, 3, 0], [3, 16, 9], 16)],
)
def test_gated_attention(rng, check, starts, lives, columns):
    """Pages that no step divides, more workers than pages and fewer, and tiles of columns."""
    case, attributes = gated_case(rng, starts, lives, columns)
    for choice in (SMALL, replace(SMALL, tiles={**SMALL.tiles, "WORKERS": 1, "ROWS": 64}), None):
        found = check(GATED, case, attributes, F32_REDUCTION, choice=choice)["y"]
        for b, live in enumerate(lives):
            assert not found[b, live:].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size", "dim"), [(2, 2, 24, 16), (4, 1, 32, 40), (1, 1, 16, 8)]
)
def test_gated_attention_geometry(rng, check, heads, kv_heads, page_size, dim):
    """Pages of several steps, the last of them cut; heads in parts, the last of them cut."""
    how = {"heads": heads, "kv_heads": kv_heads, "page_size": page_size, "dim": dim}
    case, attributes = gated_case(rng, [75, 20], [3, 5], 5, **how)
    check(GATED, case, attributes, F32_REDUCTION)


def test_gated_attention_with_large_scores(rng, check):
    case, attributes = gated_case(rng, [9, 2], [4, 6], 6)
    for scale in (0.0, 1e3):
        found = {**case, "q": case["q"] * scale}
        check(GATED, found, attributes, Tolerance(1e-3, 1e-3, 1e-3), choice=SMALL)


def test_gated_attention_bits(rng, run):
    """A column's bits depend on no other column or request, nor on how many there are."""
    starts, lives = [11, 31], [9, 2]
    case, attributes = gated_case(rng, starts, lives, 9)
    pools = {n: v for n, v in case.items() if n.endswith("_pages")}

    def found(rows, **changes):
        return run(GATED, {**rows, **pools, **changes}, attributes, choice=SMALL)["y"]

    whole = found(case)
    wide = run(GATED, case, attributes, choice=SMALL, holes={"ROWS": 64})["y"]
    assert same_bytes(wide, whole), "one tile of columns"
    turned = found({n: v.flip(0) for n, v in case.items() if n not in pools})
    assert same_bytes(turned.flip(0), whole), "rows in reverse"
    for b, live in enumerate(lives):
        row = {n: v[b : b + 1] for n, v in case.items() if n not in pools}
        for i in {0, live // 2, live - 1}:  # as plain decoding: one column
            cut = {n: row[n][:, i : i + 1].contiguous() for n in ("q", "qkv")}
            alone = found(row, **cut, start=row["start"] + i, live=ints([1]))
            assert same_bytes(alone[0, 0], whole[b, i]), f"row {b}, column {i} alone"
        for count in {1, live // 2 + 1, live}:  # a shorter block, fewer live columns
            cut = {n: row[n][:, :count].contiguous() for n in ("q", "qkv")}
            short = found(row, **cut, live=ints([count]))
            assert same_bytes(short[0], whole[b, :count]), f"row {b} of {count} columns"
            fewer = found(row, live=ints([count]))
            assert same_bytes(fewer[0, :count], whole[b, :count]), f"row {b}, {count} live"


def block_of(rng, lives, columns, *, heads, kv_heads, dim):
    case = {
        "q": normal(rng, len(lives), columns, heads, dim, scale=2.0),
        "k": normal(rng, len(lives), columns, kv_heads, dim),
        "v": normal(rng, len(lives), columns, kv_heads, dim),
        "live": ints(lives),
    }
    for b, live in enumerate(lives):
        for name in ("q", "k", "v"):
            poison_(case[name][b, live:])
    return case


def ring_case(rng, frontiers, lives, columns, *, window, heads=6, kv_heads=2, dim=20):
    slots = torch.randperm(len(lives) + 2, generator=rng)[: len(lives)].to(torch.int32)
    rings = [poison_(torch.empty(len(lives) + 2, window, kv_heads, dim)) for _ in range(2)]
    for slot, frontier in zip(slots.tolist(), frontiers, strict=True):
        for position in range(max(0, frontier - window), frontier):
            for ring in rings:
                ring[slot, position % window] = normal(rng, kv_heads, dim)
    return {
        **block_of(rng, lives, columns, heads=heads, kv_heads=kv_heads, dim=dim),
        "k_ring": rings[0],
        "v_ring": rings[1],
        "slots": slots,
        "frontier": ints(frontiers),
    }


def paged_case(rng, frontiers, lives, columns, *, page_size, heads=6, kv_heads=2, dim=20):
    pools, table = pages_of(rng, frontiers, heads=kv_heads, page_size=page_size, dim=dim)
    return {
        **block_of(rng, lives, columns, heads=heads, kv_heads=kv_heads, dim=dim),
        "k_pages": pools[0],
        "v_pages": pools[1],
        "page_table": table,
        "frontier": ints(frontiers),
    }


def ordered(op, case):
    return {name: case[name] for name in op.inputs}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("frontiers", "lives", "columns", "window"),
    [
        ([100, 0, 41], [8, 3, 0], 8, 37),
        ([64, 200], [16, 1], 16, 64),
        # Blocks longer than the window, where a column does not see the whole block.
        ([30, 6, 5], [16, 7, 2], 16, 6),
        ([1, 3], [5, 5], 5, 1),
    ],
)
def test_ring_block_attention(rng, check, causal, frontiers, lives, columns, window):
    op = get_op("ring_block_attention")
    case = ordered(op, ring_case(rng, frontiers, lives, columns, window=window))
    for choice in (SMALL, replace(SMALL, tiles={**SMALL.tiles, "WORKERS": 2, "ROWS": 64})):
        found = check(op, case, {"causal": causal}, F32_REDUCTION, choice=choice)["o"]
        for b, live in enumerate(lives):
            assert not found[b, live:].any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [4, 16, 40])
def test_paged_block_attention(rng, check, causal, page_size):
    op = get_op("paged_block_attention")
    case = ordered(op, paged_case(rng, [95, 0, 41], [16, 3, 0], 16, page_size=page_size))
    for choice in (SMALL, replace(SMALL, tiles={**SMALL.tiles, "WORKERS": 2, "ROWS": 64})):
        check(op, case, {"causal": causal}, F32_REDUCTION, choice=choice)


def test_block_attention_defaults(rng, check):
    for name, made in (
        ("ring_block_attention", ring_case(rng, [150], [3], 4, window=128)),
        ("paged_block_attention", paged_case(rng, [70], [3], 4, page_size=64)),
    ):
        op = get_op(name)
        check(op, ordered(op, made), {"causal": False}, F32_REDUCTION)


@pytest.mark.parametrize("name", ["ring_block_attention", "paged_block_attention"])
def test_block_attention_bits(rng, run, name):
    op, frontiers, lives = get_op(name), [67, 4], [9, 5]
    if name.startswith("ring"):
        case = ring_case(rng, frontiers, lives, 9, window=37)
    else:
        case = paged_case(rng, frontiers, lives, 9, page_size=16)
    case = ordered(op, case)
    shared = {n: v for n, v in case.items() if n.endswith(("_ring", "_pages"))}

    def found(rows, causal, **changes):
        return run(op, {**rows, **shared, **changes}, {"causal": causal}, choice=SMALL)["o"]

    for causal in (False, True):
        whole = found(case, causal)
        wide = run(op, case, {"causal": causal}, choice=SMALL, holes={"ROWS": 64})["o"]
        assert same_bytes(wide, whole), "one tile of columns"
        turned = found({n: v.flip(0) for n, v in case.items() if n not in shared}, causal)
        assert same_bytes(turned.flip(0), whole), "rows in reverse"
        for b, live in enumerate(lives):
            row = {n: v[b : b + 1] for n, v in case.items() if n not in shared}
            # Dead columns may be there or not; later columns too, if the block is causal.
            for count in {live, live // 2 + 1} if causal else {live}:
                cut = {n: row[n][:, :count].contiguous() for n in "qkv"}
                short = found(row, causal, **cut, live=ints([count]))
                assert same_bytes(short[0], whole[b, :count]), f"row {b} of {count} columns"


def rope_case(rng, dtype, starts, lives, columns, attributes, page_size=4):
    heads, dim, half = attributes["kv_heads"], attributes["head_dim"], attributes["rotary_half"]
    ends = [s + n for s, n in zip(starts, lives, strict=True)]
    pools, table = pages_of(rng, ends, heads=heads, page_size=page_size, dim=dim)
    width = (attributes["query_parts"] * attributes["q_heads"] + 2 * heads) * dim
    angle = normal(rng, len(starts), columns, half, scale=3.0)
    return {
        "qkv": normal(rng, len(starts), columns, width, dtype=dtype),
        "q_norm": normal(rng, dim, dtype=dtype),
        "k_norm": normal(rng, dim, dtype=dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "k_pages": pools[0].nan_to_num(7.0).to(dtype),
        "v_pages": pools[1].nan_to_num(7.0).to(dtype),
        "page_table": table,
        "start": ints(starts),
        "live": ints(lives),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("query_parts", "q_heads", "kv_heads", "head_dim", "half"), [(2, 3, 1, 20, 4), (1, 4, 2, 16, 8)]
)
def test_rope_append(
    rng, check, run, dtype, tolerance, query_parts, q_heads, kv_heads, head_dim, half
):
    """The formula; the bits of the two ops one after the other; no other byte of the pages."""
    attributes = {
        "query_parts": query_parts,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_half": half,
        "eps": 1e-6,
        "offset": True,
    }
    op, head_norm_rope, append_kv = map(get_op, ("rope_append", "head_norm_rope", "append_kv"))
    case = rope_case(rng, dtype, [3, 0, 8], [5, 0, 3], 5, attributes)
    found = check(op, case, attributes, tolerance)
    parts = run(head_norm_rope, {n: case[n] for n in head_norm_rope.inputs}, attributes)
    assert same_bytes(found["q"], parts.pop("q"))
    stored = {**{n: case[n] for n in append_kv.inputs if n not in parts}, **parts}
    append_kv.reference(**(expected := {n: v.clone() for n, v in stored.items()}))
    for name in ("k_pages", "v_pages"):
        assert same_bytes(found[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(1, 6), (3, 16)])
def test_append_kv(rng, check, dtype, heads, dim):
    starts, lives = [3, 0, 8], [5, 0, 3]
    ends = [s + n for s, n in zip(starts, lives, strict=True)]
    pools, table = pages_of(rng, ends, heads=heads, page_size=4, dim=dim)
    case = {
        "k": normal(rng, 3, 5, heads, dim, dtype=dtype),
        "v": normal(rng, 3, 5, heads, dim, dtype=dtype),
        "k_pages": pools[0].nan_to_num(7.0).to(dtype),
        "v_pages": pools[1].nan_to_num(7.0).to(dtype),
        "page_table": table,
        "start": ints(starts),
        "live": ints(lives),
    }
    check(get_op("append_kv"), case, {}, EXACT)
