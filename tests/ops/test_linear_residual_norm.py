from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.linear_residual_norm import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

ATTRIBUTES = {"eps": 1e-6, "offset": False}


def case(rng, dtype, batch=3, columns=5):
    x = torch.randn(batch, columns, 17, generator=rng)
    x[-1, -1] *= 1e4
    return {
        "y": torch.randn(batch, columns, 20, generator=rng).to(dtype),
        "weight": torch.randn(17, 20, generator=rng).to(dtype),
        "x": x.to(dtype),
        "norm": torch.randn(17, generator=rng).to(dtype),
    }


def formula(arguments, offset):
    """Row by row in float64, product and sum rounded as they would be stored."""
    dtype = arguments["x"].dtype
    y, weight, x, norm = (v.double() for v in arguments.values())
    branch = (y[:, :, None, :] * weight).sum(-1).to(dtype).double()
    out = (x + branch).to(dtype).double()
    mean = (out * out).sum(-1, keepdim=True) / 17
    return {"out": out, "n": (norm + offset) * out / (mean + 1e-6) ** 0.5}


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance, offset):
    arguments, attributes = case(rng, dtype), ATTRIBUTES | {"offset": offset}
    oracle = formula(arguments, offset)
    check_op(OP, arguments, attributes, tolerance, oracle=oracle, opcheck=offset)
    assert_row_invariant(OP, arguments, attributes, ["y", "x"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (6 * 20 + 17 * 20 + 6 * 17 + 17)
    assert (cost.write_bytes, cost.flops) == (2 * 2 * 6 * 17, 6 * 17 * (2 * 20 + 5))
    with pytest.raises(ShapeError, match="axis 2 of x must be 17"):
        OP(**{**arguments, "x": arguments["x"][..., :16]}, **ATTRIBUTES)
