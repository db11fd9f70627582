from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.linear_conv_residual_norm import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_traceable,
    check_op,
    same_bytes,
)

ATTRIBUTES = {"groups": 3, "eps": 1e-6, "offset": False}
WIDTH = 18


def case(rng, dtype, batch=3, columns=5):
    arguments = {
        "y": torch.randn(batch, columns, 20, generator=rng),
        "weight": torch.randn(WIDTH, 20, generator=rng),
        "base": torch.randn(2, 2, WIDTH, generator=rng),
        "delta": torch.randn(batch, columns, 2, 3, generator=rng),
        "x": torch.randn(batch, columns, WIDTH, generator=rng),
        "norm": torch.randn(WIDTH, generator=rng),
    }
    return {name: value.to(dtype) for name, value in arguments.items()}


def formula(arguments):
    """Channel by channel in float64, each part rounded as it would be stored."""
    dtype = arguments["x"].dtype
    y, weight, base, delta, x, norm = (v.double() for v in arguments.values())
    branch = (y[:, :, None, :] * weight).sum(-1).to(dtype).double()
    finished = torch.zeros_like(branch)
    for b, i, h in torch.cartesian_prod(*(torch.arange(n) for n in branch.shape)).tolist():
        for tap in range(min(i, 1) + 1):
            scale = base[1, tap, h] + delta[b, i, tap, h // (WIDTH // 3)]
            finished[b, i, h] += scale * branch[b, i - tap, h]
    out = (x + finished.to(dtype).double()).to(dtype).double()
    mean = (out * out).sum(-1, keepdim=True) / WIDTH
    return {"out": out, "n": norm * out / (mean + 1e-6) ** 0.5}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
@pytest.mark.parametrize(("batch", "columns"), [(1, 1), (3, 5)])
def test_matches_formula(rng, dtype, tolerance, batch, columns):
    arguments = case(rng, dtype, batch, columns)
    oracle = formula(arguments)
    check_op(OP, arguments, ATTRIBUTES, tolerance, oracle=oracle, opcheck=columns == 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_company(rng, dtype):
    """Column i needs columns i-1 and i of its own request."""
    arguments = case(rng, dtype, 3, 8)
    whole = OP.reference(**arguments, **ATTRIBUTES)
    rows = ("y", "delta", "x")
    for b, end in ((0, 1), (1, 5), (2, 8)):
        part = {n: v[b : b + 1, :end] if n in rows else v for n, v in arguments.items()}
        for found, expected in zip(OP.reference(**part, **ATTRIBUTES), whole, strict=True):
            assert same_bytes(found, expected[b : b + 1, :end])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    read = 6 * 20 + WIDTH * 20 + 2 * WIDTH + 6 * 6 + 6 * WIDTH + WIDTH
    assert cost.read_bytes == 2 * read  # one side of base
    assert cost.write_bytes == 2 * 2 * 6 * WIDTH
    # product, sum and norm of each column; two taps of each, one of the first
    taps = 2 * (5 * 2 + 2) * WIDTH
    assert cost.flops == 6 * WIDTH * (2 * 20 + 5) + taps
    with pytest.raises(ShapeError, match="4 groups do not divide O = 18"):
        wide = {"delta": spec_of(torch.empty(2, 3, 2, 4, dtype=torch.bfloat16))}
        OP.infer({**specs, **wide}, ATTRIBUTES | {"groups": 4})
