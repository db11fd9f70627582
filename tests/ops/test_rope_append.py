from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import append_kv, head_norm_rope
from dflash_graph.ops.rope_append import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    check_op,
    poison_,
    same_bytes,
)

GATED = {
    "query_parts": 2,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "rotary_half": 3,
    "eps": 1e-6,
    "offset": True,
}
PLAIN = {**GATED, "query_parts": 1, "rotary_half": 6, "offset": False}
PAGE_SIZE, PAGES = 4, 11


def case(rng, dtype, attributes, starts=(3, 0, 8), lives=(5, 0, 3), columns=5):
    batch = len(starts)
    heads = attributes["query_parts"] * attributes["q_heads"] + 2 * attributes["kv_heads"]
    table = torch.full((batch, 4), -1, dtype=torch.int32)
    order = torch.randperm(PAGES, generator=rng).tolist()
    for b, (start, live) in enumerate(zip(starts, lives, strict=True)):
        for page in range(start // PAGE_SIZE, -(-(start + live) // PAGE_SIZE)):
            table[b, page] = order.pop()
    angle = torch.rand(batch, columns, attributes["rotary_half"], generator=rng) * 6.0
    return {
        "qkv": torch.randn(batch, columns, heads * 12, generator=rng).to(dtype),
        "q_norm": torch.randn(12, generator=rng).to(dtype),
        "k_norm": torch.randn(12, generator=rng).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "k_pages": torch.randn(PAGES, 2, PAGE_SIZE, 12, generator=rng).to(dtype),
        "v_pages": torch.randn(PAGES, 2, PAGE_SIZE, 12, generator=rng).to(dtype),
        "page_table": table,
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def formula(arguments, attributes):
    """Heads from their op, which has an oracle of its own; places one column at a time."""
    wide = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
    parts = {n: wide[n] for n in head_norm_rope.OP.inputs}
    q, k, v = head_norm_rope.OP.reference(**parts, **attributes)
    pools = {"k_pages": (wide["k_pages"], k), "v_pages": (wide["v_pages"], v)}
    for b, (start, live) in enumerate(zip(wide["start"], wide["live"], strict=True)):
        for i in range(int(live)):
            page, place = divmod(int(start) + i, PAGE_SIZE)
            for pool, block in pools.values():
                pool[wide["page_table"][b, page], :, place] = block[b, i]
    return {"q": q, **{name: pool for name, (pool, _) in pools.items()}}


@pytest.mark.parametrize("attributes", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)]
)
def test_matches_formula(rng, dtype, tolerance, attributes):
    arguments = case(rng, dtype, attributes)
    check_op(OP, arguments, attributes, tolerance, oracle=formula(arguments, attributes))


def test_touches_no_other_byte(rng):
    arguments = case(rng, torch.bfloat16, GATED)
    for name in ("k_pages", "v_pages"):
        poison_(arguments[name])
    poison_(arguments["qkv"][1])
    poison_(arguments["qkv"][2, 3:])
    parts = {n: arguments[n] for n in head_norm_rope.OP.inputs}
    q, k, v = head_norm_rope.OP.reference(**parts, **GATED)
    expected = {n: arguments[n].clone() for n in append_kv.OP.inputs if n not in ("k", "v")}
    append_kv.OP.reference(k=k, v=v, **expected)
    assert same_bytes(OP(**arguments, **GATED), q)
    for name in ("k_pages", "v_pages"):
        assert same_bytes(arguments[name], expected[name])
        assert int(arguments[name].isfinite().all(-1).sum()) == 8 * 2


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, GATED, (2, 2), (5, 5))
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, GATED, context=6)  # positions 6..10: pages 1 and 2
    heads = head_norm_rope.OP.cost({n: specs[n] for n in head_norm_rope.OP.inputs}, GATED)
    assert cost.read_bytes == heads.read_bytes + 4 * (2 * 2 + 4)
    assert (cost.write_bytes, cost.flops) == (heads.write_bytes, heads.flops)
    with pytest.raises(ShapeError, match=r"pages of \(G, D\) = \(3, 12\) must have \(2, 12\)"):
        pages = spec_of(torch.empty(PAGES, 3, PAGE_SIZE, 12, dtype=torch.bfloat16))
        OP.infer({**specs, "k_pages": pages, "v_pages": pages}, GATED)
    with pytest.raises(ShapeError, match="query_parts must be 1"):
        wide = {**specs, "qkv": spec_of(torch.empty(2, 5, 16 * 12, dtype=torch.bfloat16))}
        OP.infer(wide, {**GATED, "query_parts": 3})
