from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.paged_attention import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    EXACT,
    F32_ELEMENTWISE,
    assert_matches,
    check_op,
    poison_,
    same_bytes,
)

PAGE_SIZE = 4


def case(rng, dtype, starts, lives, width, *, heads=6, kv_heads=2, dim=16, scale=1.0):
    """A block over pages in which all that no live column may see is NaN."""
    batch = len(starts)
    needed = [-(-(s + n) // PAGE_SIZE) if n else 0 for s, n in zip(starts, lives, strict=True)]
    pages = sum(needed) + 2
    order = torch.randperm(pages, generator=rng).tolist()
    table = torch.full((batch, max(needed) + 1), -1, dtype=torch.int32)
    pools = [poison_(torch.empty(pages, kv_heads, PAGE_SIZE, dim)) for _ in range(2)]
    q = torch.randn(batch, width, heads, dim, generator=rng) * scale
    for b, (start, live) in enumerate(zip(starts, lives, strict=True)):
        q[b, live:] = float("nan")
        for place in range(needed[b]):
            page = order.pop()
            table[b, place] = page
            count = min(PAGE_SIZE, start + live - place * PAGE_SIZE)
            for pool in pools:
                pool[page, :, :count] = torch.randn(kv_heads, count, dim, generator=rng)
    return {
        "q": q.to(dtype),
        "k_pages": pools[0].to(dtype),
        "v_pages": pools[1].to(dtype),
        "page_table": table,
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def formula(arguments):
    """Softmax over the gathered context, one query head at a time, in float64."""
    q, k_pages, v_pages = (arguments[n].double() for n in ("q", "k_pages", "v_pages"))
    heads, dim = q.shape[2:]
    group = heads // k_pages.shape[1]
    o = torch.zeros_like(q)
    for b, (start, live) in enumerate(
        zip(arguments["start"].tolist(), arguments["live"].tolist(), strict=True)
    ):
        for i in range(live):
            places = [divmod(p, PAGE_SIZE) for p in range(start + i + 1)]
            table = arguments["page_table"][b].tolist()
            for h in range(heads):
                g = h // group
                keys = torch.stack([k_pages[table[page], g, at] for page, at in places])
                values = torch.stack([v_pages[table[page], g, at] for page, at in places])
                weights = torch.softmax(keys @ q[b, i, h] / dim**0.5, dim=0)
                o[b, i, h] = weights @ values
    return o.flatten(2)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
@pytest.mark.parametrize(
    ("starts", "lives", "width"),
    [
        ([0], [1], 1),
        ([PAGE_SIZE - 1], [2], 2),
        ([13, 0, 5], [5, 0, 2], 5),
        ([30, 3, 0], [3, 16, 9], 16),
    ],
)
def test_matches_formula(rng, dtype, tolerance, starts, lives, width):
    arguments = case(rng, dtype, starts, lives, width)
    oracle = {"o": formula(arguments)}
    found = check_op(OP, arguments, {}, tolerance, oracle=oracle, opcheck=False)["o"]
    for b, live in enumerate(lives):
        assert not found[b, live:].any()


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_ties_and_large_scores(rng, scale):
    arguments = case(rng, torch.float32, [9, 2], [4, 6], 6, scale=scale)
    check_op(OP, arguments, {}, F32_ELEMENTWISE, oracle={"o": formula(arguments)}, opcheck=False)


def test_hand_worked():
    # Two positions, scores 0 and ln 3 after the scale 1/2: weights 1/4 and 3/4.
    pages = torch.zeros(1, 1, 2, 4)
    pages[0, 0, 1, 0] = 2.0 * torch.log(torch.tensor(3.0))
    arguments = {
        "q": torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]]),
        "k_pages": pages,
        "v_pages": torch.tensor([[[[4.0, 0.0, 1.0, -4.0], [0.0, 4.0, 1.0, 4.0]]]]),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "start": torch.ones(1, dtype=torch.int32),
        "live": torch.ones(1, dtype=torch.int32),
    }
    expected = torch.tensor([[[1.0, 3.0, 1.0, 2.0]]])
    assert_matches(OP.reference(**arguments), expected, F32_ELEMENTWISE)


def test_all_rows_dead_give_zeros(rng):
    arguments = case(rng, torch.float32, [5, -1], [0, 0], 3)
    assert_matches(OP.reference(**arguments), torch.zeros(2, 3, 96), EXACT)


def test_registration(rng):
    # opcheck compares arguments before and after, so the pages hold no NaN here.
    arguments = case(rng, torch.bfloat16, [6, 4], [2, 4], 4)
    clean = {name: v.nan_to_num() if v.is_floating_point() else v for name, v in arguments.items()}
    check_op(OP, clean, {}, BF16_ELEMENTWISE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16), (3, 3, 20), (4, 2, 64), (1, 1, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant(rng, dtype, heads, kv_heads, dim):
    starts, lives = [11, 2, 31], [16, 13, 1]
    how = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
    arguments = case(rng, dtype, starts, lives, 16, **how)
    whole = OP.reference(**arguments)
    for b, live in enumerate(lives):
        row = {n: v[b : b + 1] for n, v in arguments.items() if not n.endswith("_pages")}
        pools = {n: v for n, v in arguments.items() if n.endswith("_pages")}
        for i in range(live):  # as plain decoding: one column, later positions not there yet
            one = {
                **pools,
                **row,
                "q": row["q"][:, i : i + 1].clone(),
                "start": row["start"] + i,
                "live": torch.ones(1, dtype=torch.int32),
            }
            assert same_bytes(OP.reference(**one)[0, 0], whole[b, i]), (b, i)
        for cut in {1, live // 2 + 1, live}:  # a shorter block, fewer live columns
            short = {**pools, **row, "q": row["q"][:, :cut].clone()}
            short["live"] = torch.tensor([cut], dtype=torch.int32)
            assert same_bytes(OP.reference(**short)[0], whole[b, :cut])
            short["q"] = row["q"]
            assert same_bytes(OP.reference(**short)[0, :cut], whole[b, :cut])
    turned = {n: v if n.endswith("_pages") else v.flip(0) for n, v in arguments.items()}
    assert same_bytes(OP.reference(**turned).flip(0), whole)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [6, 6], [3, 3], 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {}, context=6)  # columns see 7, 8 and 9 positions in 3 pages
    assert cost.read_bytes == 2 * (2 * 3 * 96) + 2 * 2 * (2 * 9 * 2 * 16) + 4 * (2 * 3 + 4)
    assert cost.write_bytes == 2 * 2 * 3 * 96
    assert cost.flops == 2 * 6 * (24 * (4 * 16 + 4) + 3 * 16)
    with pytest.raises(ShapeError, match="G = 2 must divide N = 5"):
        OP(**{**arguments, "q": torch.zeros(2, 3, 5, 16, dtype=torch.bfloat16)})
