from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.swiglu import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

WIDTH = 19


def case(rng, dtype, batch=3, columns=8):
    gate_up = torch.randn(batch, columns, 2 * WIDTH, generator=rng) * 4.0
    gate_up[0, 0, :4] = torch.tensor([0.0, 88.0, -88.0, -3e4])
    gate_up[0, 0, 4] = 1e15
    return {"gate_up": gate_up.to(dtype)}


def silu(x):
    return x / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    rows = arguments["gate_up"].double().view(-1, 2 * WIDTH).tolist()
    oracle = []
    for row in rows:
        oracle += [silu(g) * u for g, u in zip(row[:WIDTH], row[WIDTH:], strict=True)]
    oracle = {"y": torch.tensor(oracle, dtype=torch.float64).view(3, 8, WIDTH)}
    check_op(OP, arguments, {"ffn_width": WIDTH}, tolerance, oracle=oracle)
    assert_row_invariant(OP, arguments, {"ffn_width": WIDTH}, ["gate_up"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), {"ffn_width": WIDTH})


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 1, 2)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {"ffn_width": WIDTH})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (2 * 4 * 19, 2 * 2 * 19, 4 * 2 * 19)
    with pytest.raises(ShapeError, match="axis 2 of gate_up must be 40"):
        OP(**arguments, ffn_width=20)
