from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import linear_residual_norm, linear_residual_scale
from dflash_graph.ops.scaled_linear import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

ATTRIBUTES = {"segments": 2, "eps": 1e-6}


def case(rng, dtype, batch=3, columns=5, outputs=17):
    z = torch.randn(batch, columns, 128, generator=rng)
    z[-1, -1] *= 1e4
    z[0, 0] *= 1e-5  # eps decides
    squares = z.square().unflatten(-1, (2, 64)).sum(-1)
    return {
        "z": z.to(dtype),
        "squares": squares,
        "weight": torch.randn(outputs, 128, generator=rng).to(dtype),
    }


def formula(arguments):
    z, squares, weight = (v.double() for v in arguments.values())
    factor = 1.0 / (squares.sum(-1, keepdim=True) / 128 + 1e-6) ** 0.5
    return {"y": (z[:, :, None, :] * weight).sum(-1) * factor}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    check_op(OP, arguments, ATTRIBUTES, tolerance, oracle=formula(arguments))
    assert_row_invariant(OP, arguments, ATTRIBUTES, ["z", "squares"])


def test_it_is_the_product_over_a_norm(rng):
    """What linear_residual_scale leaves stands for the norm of its sum."""
    x, y = (torch.randn(2, 3, 128, generator=rng, dtype=torch.float64) for _ in range(2))
    weight, norm = torch.randn(128, 128, generator=rng).double(), torch.randn(128, generator=rng)
    given = {"y": y, "weight": weight, "x": x, "norm": norm.double()}
    out, z, squares = linear_residual_scale.reference(**given, segments=2, offset=True)
    same, n = linear_residual_norm.reference(**given, eps=1e-6, offset=True)
    after = torch.randn(9, 128, generator=rng).double()
    found = OP.reference(z, squares, after, **ATTRIBUTES)
    assert torch.equal(out, same)
    torch.testing.assert_close(found, n @ after.t())


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (6 * 128 + 17 * 128) + 4 * 6 * 2
    assert (cost.write_bytes, cost.flops) == (2 * 6 * 17, 6 * 17 * (2 * 128 + 1))
    with pytest.raises(ShapeError, match="axis 2 of z must be 64"):
        OP(**arguments, segments=1, eps=1e-6)
