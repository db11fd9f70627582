from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.linear import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)


def case(rng, dtype, batch, width, inputs, outputs):
    return {
        "x": torch.randn(batch, width, inputs, generator=rng).to(dtype),
        "weight": (torch.randn(outputs, inputs, generator=rng) * inputs**-0.5).to(dtype),
    }


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance, tiled):
    for batch, width in ((1, 1), (3, 5), (1, 8), (3, 16)):
        arguments = case(rng, dtype, batch, width, 72, 40)
        x, weight = arguments["x"].double(), arguments["weight"].double()
        oracle = {"y": (x[:, :, None, :] * weight).sum(-1)}
        opcheck = (batch, width) == (3, 5)
        found = check_op(OP, arguments, {"tiled": tiled}, tolerance, oracle=oracle, opcheck=opcheck)
        assert found["y"].is_contiguous()


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 8), (63, 17), (256, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant(rng, dtype, inputs, outputs):
    arguments = case(rng, dtype, 3, 16, inputs, outputs)
    assert_row_invariant(OP, arguments, {"tiled": True}, ["x"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.float32, 3, 5, 24, 8), {"tiled": True})


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3, 10, 7)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {"tiled": True})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (2 * (60 + 70), 2 * 42, 840)
    with pytest.raises(ShapeError, match="axis 1 of weight must be 10"):
        OP(x=arguments["x"], weight=arguments["weight"].t().contiguous(), tiled=True)
