from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.rms_norm import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    EXACT,
    F32_ELEMENTWISE,
    assert_matches,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

DTYPES = [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)]


def case(rng, dtype, shape=(3, 8, 96)):
    x = torch.randn(shape, generator=rng) * 3.0
    x[0, 0] = 0.0
    x[0, 1] *= 1e15
    x[0, 2] *= 1e-15
    return {
        "x": x.to(dtype),
        "weight": torch.randn(shape[-1], generator=rng).to(dtype),
    }


def formula(x, weight, eps, offset):
    x, weight = x.double(), weight.double()
    y = torch.empty_like(x)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in x.shape[:2])).tolist():
        row = x[tuple(index)]
        y[tuple(index)] = (weight + offset) * row / ((row @ row) / len(row) + eps) ** 0.5
    return y


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_matches_formula(rng, dtype, tolerance, offset):
    arguments = case(rng, dtype)
    attributes = {"eps": 1e-6, "offset": offset}
    oracle = {"y": formula(**arguments, **attributes)}
    found = check_op(OP, arguments, attributes, tolerance, oracle=oracle, opcheck=offset)
    assert not found["y"][0, 0].any()


def test_hand_worked():
    arguments = {"x": torch.tensor([[[3.0, -4.0]]]), "weight": torch.tensor([1.0, 0.5])}
    plain = OP.reference(**arguments, eps=3.5, offset=False)  # mean square 12.5, root 4
    offset = OP.reference(**arguments, eps=3.5, offset=True)
    assert_matches(plain, torch.tensor([[[0.75, -0.5]]]), EXACT)
    assert_matches(offset, torch.tensor([[[1.5, -1.5]]]), EXACT)


@pytest.mark.parametrize("width", [7, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant(rng, dtype, width):
    arguments = case(rng, dtype, (3, 16, width))
    assert_row_invariant(OP, arguments, {"eps": 1e-6, "offset": True}, ["x"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), {"eps": 1e-6, "offset": True})


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, (1, 5, 10))
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {"eps": 1e-6, "offset": True})
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (2 * (50 + 10), 2 * 50, 200)
    with pytest.raises(ShapeError, match="axis 0 of weight must be 10"):
        OP(x=arguments["x"], weight=torch.zeros(9, dtype=torch.bfloat16), eps=1e-6, offset=True)
