from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.head_norm_rope import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
    same_bytes,
)

GATED = {
    "query_parts": 2,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 24,
    "rotary_half": 3,
    "eps": 1e-6,
    "offset": True,
}
PLAIN = {**GATED, "query_parts": 1, "rotary_half": 12, "offset": False}


def case(rng, dtype, attributes, batch=3, width=8):
    heads = attributes["query_parts"] * attributes["q_heads"] + 2 * attributes["kv_heads"]
    dim, half = attributes["head_dim"], attributes["rotary_half"]
    qkv = torch.randn(batch, width, heads * dim, generator=rng) * 2.0
    qkv[0, 0, :dim] = 0.0
    qkv[0, -1] *= 1e12
    angle = torch.rand(batch, width, half, generator=rng) * 6.0
    return {
        "qkv": qkv.to(dtype),
        "q_norm": torch.randn(dim, generator=rng).to(dtype),
        "k_norm": torch.randn(dim, generator=rng).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }


def head(x, norm, cos, sin, *, eps, offset):
    """One head of one column, as lists of floats."""
    half = len(cos)
    root = math.sqrt(sum(c * c for c in x) / len(x) + eps)
    n = [(w + offset) * c / root for w, c in zip(norm, x, strict=True)]
    y = list(n)
    for c in range(half):
        y[c] = n[c] * cos[c] - n[c + half] * sin[c]
        y[c + half] = n[c + half] * cos[c] + n[c] * sin[c]
    return y


def formula(arguments, attributes):
    qkv, q_norm, k_norm, cos, sin = (v.double().tolist() for v in arguments.values())
    dim, parts = attributes["head_dim"], attributes["query_parts"]
    q_heads, kv_heads = attributes["q_heads"], attributes["kv_heads"]
    how = {"eps": attributes["eps"], "offset": attributes["offset"]}
    q, k, v = [], [], []
    for row, row_cos, row_sin in zip(qkv, cos, sin, strict=True):
        for column, c, s in zip(row, row_cos, row_sin, strict=True):
            heads = [column[at : at + dim] for at in range(0, len(column), dim)]
            queries, rest = heads[: parts * q_heads : parts], heads[parts * q_heads :]
            q.append([head(x, q_norm, c, s, **how) for x in queries])
            k.append([head(x, k_norm, c, s, **how) for x in rest[:kv_heads]])
            v.append(rest[kv_heads:])
    shape = arguments["qkv"].shape[:2]
    return {
        name: torch.tensor(value, dtype=torch.float64).view(*shape, -1, dim)
        for name, value in (("q", q), ("k", k), ("v", v))
    }


@pytest.mark.parametrize("attributes", [GATED, PLAIN], ids=["gated", "plain"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_matches_formula(rng, dtype, tolerance, attributes):
    arguments = case(rng, dtype, attributes)
    oracle = formula(arguments, attributes)
    opcheck = dtype is torch.bfloat16
    found = check_op(OP, arguments, attributes, tolerance, oracle=oracle, opcheck=opcheck)
    values = arguments["qkv"][..., -2 * 24 :].reshape(3, 8, 2, 24)
    assert same_bytes(found["v"], values)
    assert all(value.is_contiguous() for value in found.values())


@pytest.mark.parametrize("attributes", [GATED, PLAIN], ids=["gated", "plain"])
def test_row_invariant_and_traceable(rng, attributes):
    for dtype in (torch.float32, torch.bfloat16):
        arguments = case(rng, dtype, attributes, width=16)
        assert_row_invariant(OP, arguments, attributes, ["qkv", "cos", "sin"])
    assert_traceable(OP, arguments, attributes)


def test_one_row_and_column_gives_fresh_tensors(rng):
    arguments = case(rng, torch.float32, PLAIN, 1, 1)
    results = OP.reference(**arguments, **PLAIN)
    for result in results:
        result.fill_(7.0)
    assert not bool((arguments["qkv"] == 7.0).any())


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, GATED, 1, 2)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, GATED)
    # 8 heads without gates of 24, two norms, two tables of 3; per q and k head 4 * 24 + 6 * 3.
    assert cost.read_bytes == 2 * (2 * 8 * 24 + 2 * 24) + 4 * 2 * 2 * 3
    assert (cost.write_bytes, cost.flops) == (2 * 2 * 8 * 24, 2 * 6 * 114)
    with pytest.raises(ShapeError, match="axis 2 of qkv must be"):
        OP.infer(specs, {**GATED, "query_parts": 3})
    wide = {**specs, "qkv": spec_of(torch.zeros(1, 2, 16 * 24, dtype=torch.bfloat16))}
    with pytest.raises(ShapeError, match=r"query_parts must be 1 .* got 3"):
        OP.infer(wide, {**GATED, "query_parts": 3})
    turn = spec_of(torch.zeros(1, 2, 13))
    with pytest.raises(ShapeError, match="wider than head_dim = 24"):
        OP.infer({**specs, "cos": turn, "sin": turn}, {**GATED, "rotary_half": 13})
