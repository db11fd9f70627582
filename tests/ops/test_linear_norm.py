from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.linear_norm import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

ATTRIBUTES = {"eps": 1e-6, "offset": True}


def case(rng, dtype, batch=3, columns=5):
    x = torch.randn(batch, columns, 20, generator=rng)
    x[0, 0] = 0.0
    return {
        "x": x.to(dtype),
        "weight": torch.randn(17, 20, generator=rng).to(dtype),
        "norm": torch.randn(17, generator=rng).to(dtype),
    }


def formula(arguments, offset):
    """Row by row in float64, the product rounded as it would be stored."""
    dtype = arguments["x"].dtype
    x, weight, norm = (v.double() for v in arguments.values())
    y = (x[:, :, None, :] * weight).sum(-1).to(dtype).double()
    mean = (y * y).sum(-1, keepdim=True) / 17
    return (norm + offset) * y / (mean + 1e-6) ** 0.5


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance, offset):
    arguments, attributes = case(rng, dtype), ATTRIBUTES | {"offset": offset}
    oracle = {"n": formula(arguments, offset)}
    found = check_op(OP, arguments, attributes, tolerance, oracle=oracle, opcheck=offset)
    assert not found["n"][0, 0].any()
    assert_row_invariant(OP, arguments, attributes, ["x"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (6 * 20 + 17 * 20 + 17)
    assert (cost.write_bytes, cost.flops) == (2 * 6 * 17, 6 * 17 * (2 * 20 + 4))
    with pytest.raises(ShapeError, match="axis 0 of norm must be 17"):
        OP(**{**arguments, "norm": arguments["norm"][:16]}, **ATTRIBUTES)
