from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.linear_residual_scale import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

ATTRIBUTES = {"segments": 2, "offset": False}


def case(rng, dtype, batch=3, columns=5):
    x = torch.randn(batch, columns, 128, generator=rng)
    x[-1, -1] *= 1e4
    return {
        "y": torch.randn(batch, columns, 20, generator=rng).to(dtype),
        "weight": torch.randn(128, 20, generator=rng).to(dtype),
        "x": x.to(dtype),
        "norm": torch.randn(128, generator=rng).to(dtype),
    }


def formula(arguments, offset):
    """Row by row in float64, product and sum rounded as they would be stored."""
    dtype = arguments["x"].dtype
    y, weight, x, norm = (v.double() for v in arguments.values())
    branch = (y[:, :, None, :] * weight).sum(-1).to(dtype).double()
    out = (x + branch).to(dtype).double()
    squares = torch.stack([(out[..., :64] ** 2).sum(-1), (out[..., 64:] ** 2).sum(-1)], -1)
    return {"out": out, "z": (norm + offset) * out, "squares": squares}


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
    assert cost.read_bytes == 2 * (6 * 20 + 128 * 20 + 6 * 128 + 128)
    assert cost.write_bytes == 2 * 2 * 6 * 128 + 4 * 6 * 2
    assert cost.flops == 6 * 128 * (2 * 20 + 4)
    with pytest.raises(ShapeError, match="axis 0 of weight must be 192"):
        OP(**arguments, segments=3, offset=True)
