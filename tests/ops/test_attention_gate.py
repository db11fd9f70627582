from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.attention_gate import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

HEADS = {"q_heads": 3, "kv_heads": 1, "head_dim": 10}


def case(rng, dtype, batch=3, width=8):
    qkv = torch.randn(batch, width, 80, generator=rng) * 3.0
    qkv.view(batch, width, 8, 10)[:, :, [0, 2, 4, 6, 7]] = float("nan")  # queries, k and v
    qkv[0, 0, 10:13] = torch.tensor([0.0, 600.0, -600.0])
    return {
        "o": torch.randn(batch, width, 30, generator=rng).to(dtype),
        "qkv": qkv.to(dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    o, qkv = (value.double().view(24, -1).tolist() for value in arguments.values())
    oracle = [
        [a / (1.0 + math.exp(-gates[(c // 10) * 20 + 10 + c % 10])) for c, a in enumerate(values)]
        for values, gates in zip(o, qkv, strict=True)
    ]
    oracle = {"y": torch.tensor(oracle, dtype=torch.float64).view(3, 8, 30)}
    found = check_op(OP, arguments, HEADS, tolerance, oracle=oracle)
    assert found["y"][0, 0, 0] == arguments["o"][0, 0, 0] / 2
    assert_row_invariant(OP, arguments, HEADS, ["o", "qkv"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), HEADS)


def test_cost_and_contract(rng):
    specs = {name: spec_of(value) for name, value in case(rng, torch.bfloat16, 1, 2).items()}
    cost = OP.cost(specs, HEADS)
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (2 * 120, 2 * 60, 4 * 60)
    with pytest.raises(ShapeError, match="axis 2 of qkv must be 100"):
        OP.infer(specs, {**HEADS, "kv_heads": 2})
