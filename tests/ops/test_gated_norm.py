from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gated_norm import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

HEADS = {"value_heads": 3, "value_dim": 12, "eps": 1e-6}


def case(rng, dtype, batch=3, width=8):
    y = torch.randn(batch, width, 3, 12, generator=rng)
    y[0, 0, 0] = 0.0
    y[0, 0, 1] *= 1e15
    z = torch.randn(batch, width, 36, generator=rng) * 3.0
    z[0, 1, :4] = torch.tensor([0.0, 600.0, -600.0, -1e4])
    return {"y": y, "z": z.to(dtype), "weight": torch.randn(12, generator=rng).to(dtype)}


def silu(x):
    return x / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    y, z, weight = (v.double() for v in arguments.values())
    oracle = []
    for heads, gates in zip(y.view(-1, 3, 12).tolist(), z.view(-1, 3, 12).tolist(), strict=True):
        for head, gate in zip(heads, gates, strict=True):
            root = math.sqrt(sum(c * c for c in head) / 12 + 1e-6)
            pairs = zip(weight.tolist(), head, gate, strict=True)
            oracle += [w * c / root * silu(s) for w, c, s in pairs]
    oracle = {"out": torch.tensor(oracle, dtype=torch.float64).view(3, 8, 36)}
    check_op(OP, arguments, HEADS, tolerance, oracle=oracle)
    assert_row_invariant(OP, arguments, HEADS, ["y", "z"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), HEADS)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 1, 2)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, HEADS)
    assert (cost.read_bytes, cost.write_bytes) == (4 * 72 + 2 * (72 + 12), 2 * 72)
    assert cost.flops == 8 * 72
    with pytest.raises(ShapeError, match=r"gated_norm\.y: expected dtype float32, got bfloat16"):
        OP(**{**arguments, "y": arguments["y"].bfloat16()}, **HEADS)
