from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.residual_add import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_row_invariant,
    assert_traceable,
    check_op,
)


def case(rng, dtype, shape=(3, 8, 21)):
    x, y = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    y[0, 0] = -x[0, 0]
    x[0, 1] *= 1e20
    return {"x": x, "y": y}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_sum(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    found = check_op(OP, arguments, {}, tolerance)
    assert not found["out"][0, 0].any()
    assert_row_invariant(OP, arguments, {}, ["x", "y"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), {})


def test_cost_and_contract(rng):
    arguments = case(rng, torch.float32, (1, 2, 5))
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (4 * 20, 4 * 10, 10)
    with pytest.raises(ShapeError, match="expected dtype float32, got bfloat16"):
        OP(x=arguments["x"], y=arguments["y"].bfloat16())
