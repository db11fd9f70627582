from __future__ import annotations

from itertools import product

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import attention_gate, paged_attention
from dflash_graph.ops.gated_attention import OP
from dflash_graph.testing import BF16_REDUCTION, F32_ELEMENTWISE, check_op, poison_, same_bytes

HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 6}
PAGE_SIZE = 4


def case(rng, dtype, starts, lives, columns):
    """A block whose pages are all there; what no live column sees is NaN."""
    batch = len(starts)
    pools = [torch.randn(5 * batch, 2, PAGE_SIZE, 6, generator=rng) for _ in range(2)]
    table = torch.randperm(5 * batch, generator=rng).view(batch, 5)
    q = torch.randn(batch, columns, 4, 6, generator=rng)
    qkv = torch.randn(batch, columns, 72, generator=rng) * 3.0
    qkv.view(batch, columns, 12, 6)[:, :, [0, 2, 4, 6, 8, 9, 10, 11]] = float("nan")
    for b, (start, live) in enumerate(zip(starts, lives, strict=True)):
        poison_(q[b, live:])
        poison_(qkv[b, live:])
        page, offset = divmod(start + live, PAGE_SIZE)
        for pool in pools:
            poison_(pool[int(table[b, page]), :, offset:])
    return {
        "q": q.to(dtype),
        "k_pages": pools[0].to(dtype),
        "v_pages": pools[1].to(dtype),
        "page_table": table.to(torch.int32),
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
        "qkv": qkv.to(dtype),
    }


def formula(arguments):
    """Softmax and gate, one head of one column at a time, in float64."""
    q, keys, values, table, start, live, qkv = arguments.values()
    y = torch.zeros(*q.shape, dtype=torch.float64)
    for b, h in product(range(len(q)), range(4)):
        for i in range(int(live[b])):
            seen = [divmod(p, PAGE_SIZE) for p in range(int(start[b]) + i + 1)]
            k, v = (
                torch.stack([pool[table[b, page], h // 2, at] for page, at in seen]).double()
                for pool in (keys, values)
            )
            o = torch.softmax(k @ q[b, i, h].double() / 6**0.5, 0) @ v
            y[b, i, h] = o / (1.0 + (-qkv[b, i, 12 * h + 6 : 12 * h + 12].double()).exp())
    return {"y": y.flatten(2)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_REDUCTION)]
)
@pytest.mark.parametrize(("starts", "lives", "columns"), [([0], [1], 1), ([9, 3, 0], [3, 0, 5], 5)])
def test_matches_formula(rng, dtype, tolerance, starts, lives, columns):
    arguments = case(rng, dtype, starts, lives, columns)
    oracle = formula(arguments)
    found = check_op(OP, arguments, HEADS, tolerance, oracle=oracle, opcheck=False)["y"]
    for b, live in enumerate(lives):
        assert not found[b, live:].any()
    arguments["qkv"].nan_to_num_()
    o = paged_attention.OP.reference(**{n: arguments[n] for n in paged_attention.OP.inputs})
    assert same_bytes(found, attention_gate.OP.reference(o, arguments["qkv"], **HEADS))


def test_registration(rng):
    # opcheck compares arguments before and after, so nothing is NaN here.
    arguments = case(rng, torch.bfloat16, [9, 3], [3, 2], 3)
    clean = {n: v.nan_to_num() if v.is_floating_point() else v for n, v in arguments.items()}
    check_op(OP, clean, HEADS, BF16_REDUCTION)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [6, 6], [3, 3], 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, HEADS, context=6)
    parts = {n: specs[n] for n in paged_attention.OP.inputs}
    attention = paged_attention.OP.cost(parts, {}, context=6)
    o = attention.write_bytes
    flat = spec_of(torch.empty(2, 3, 24, dtype=torch.bfloat16))
    gate = attention_gate.OP.cost({"o": flat, "qkv": specs["qkv"]}, HEADS)
    assert cost.read_bytes == attention.read_bytes + gate.read_bytes - o  # o stays inside
    assert (cost.write_bytes, cost.flops) == (o, attention.flops + gate.flops)
    with pytest.raises(ShapeError, match=r"\(N, G, D\) = \(4, 2, 6\) must be .* = \(2, 4, 6\)"):
        OP.infer(specs, {"q_heads": 2, "kv_heads": 4, "head_dim": 6})
