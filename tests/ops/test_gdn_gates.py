from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_gates import OP
from dflash_graph.testing import (
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

HEADS = {"value_heads": 6}


def case(rng, dtype, batch=3, width=8):
    ba = torch.randn(batch, width, 12, generator=rng) * 3.0
    ba[0, 0] = 0.0
    ba[0, 1] = torch.tensor([200.0, -200.0, 1e4, -1e4, 80.0, -80.0]).repeat(2)
    return {
        "ba": ba.to(dtype),
        "a_log": torch.randn(6, generator=rng),
        "dt_bias": torch.randn(6, generator=rng),
    }


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def softplus(x):
    return x + math.log1p(math.exp(-x)) if x > 0.0 else math.log1p(math.exp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_formula(rng, dtype):
    arguments = case(rng, dtype)
    ba, a_log, bias = (v.double().tolist() for v in arguments.values())
    beta = [[[sigmoid(b) for b in column[:6]] for column in row] for row in ba]
    g = [
        [
            [
                -math.exp(s) * softplus(a + d)
                for a, s, d in zip(column[6:], a_log, bias, strict=True)
            ]
            for column in row
        ]
        for row in ba
    ]
    oracle = {"beta": torch.tensor(beta).double(), "g": torch.tensor(g, dtype=torch.float64)}
    check_op(OP, arguments, HEADS, F32_ELEMENTWISE, oracle=oracle)
    assert_row_invariant(OP, arguments, HEADS, ["ba"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), HEADS)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 1, 2)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, HEADS)
    assert (cost.read_bytes, cost.write_bytes) == (2 * 24 + 4 * 12, 2 * 4 * 12)
    assert cost.flops == 2 * 6 * 8 + 6
    with pytest.raises(ShapeError, match=r"gdn_gates\.a_log: expected dtype float32, got bfloat16"):
        OP(**{**arguments, "a_log": arguments["a_log"].bfloat16()}, **HEADS)
