from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.scaled_swiglu_linear import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

FFN = 13
ATTRIBUTES = {"ffn_width": FFN, "segments": 1, "eps": 1e-6}


def case(rng, dtype, batch=3, columns=5):
    weight = torch.randn(2 * FFN, 64, generator=rng)
    weight[0], weight[1] = weight[0] * 1e3, 0.0
    return {
        "z": torch.randn(batch, columns, 64, generator=rng).to(dtype),
        "squares": (0.5 + torch.rand(batch, columns, 1, generator=rng)) * 64.0,
        "weight": weight.to(dtype),
    }


def formula(arguments):
    """The first half of the features is the gate; both halves rounded as they would be stored."""
    dtype = arguments["z"].dtype
    z, squares, weight = (v.double() for v in arguments.values())
    factor = 1.0 / (squares / 64 + 1e-6) ** 0.5
    features = ((z[:, :, None, :] * weight).sum(-1) * factor).to(dtype).double()
    gate, up = features[..., :FFN], features[..., FFN:]
    return {"y": gate / (1.0 + torch.exp(-gate)) * up}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    found = check_op(OP, arguments, ATTRIBUTES, tolerance, oracle=formula(arguments))
    assert not found["y"][..., 1].any()
    assert_row_invariant(OP, arguments, ATTRIBUTES, ["z", "squares"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (6 * 64 + 26 * 64) + 4 * 6
    assert (cost.write_bytes, cost.flops) == (2 * 6 * 13, 6 * 13 * (4 * 64 + 6))
    with pytest.raises(ShapeError, match="axis 0 of weight must be 28"):
        OP(**arguments, **ATTRIBUTES | {"ffn_width": 14})
