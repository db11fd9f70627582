from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.scaled_gdn_project import OP
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    assert_row_invariant,
    assert_traceable,
    check_op,
)

ATTRIBUTES = {"channels": 11, "value_width": 6, "heads": 3, "segments": 1, "eps": 1e-6}
NAMES, WIDTHS = ("columns", "z", "ba"), (11, 6, 6)


def case(rng, dtype, batch=3, columns=5):
    return {
        "x": torch.randn(batch, columns, 64, generator=rng).to(dtype),
        "squares": (0.5 + torch.rand(batch, columns, 1, generator=rng)) * 64.0,
        "weight": torch.randn(23, 64, generator=rng).to(dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
def test_matches_formula(rng, dtype, tolerance):
    arguments = case(rng, dtype)
    x, squares, weight = (v.double() for v in arguments.values())
    factor = 1.0 / (squares / 64 + 1e-6) ** 0.5
    parts = ((x[:, :, None, :] * weight).sum(-1) * factor).split(WIDTHS, -1)
    oracle = dict(zip(NAMES, parts, strict=True))
    found = check_op(OP, arguments, ATTRIBUTES, tolerance, oracle=oracle)
    assert all(value.is_contiguous() for value in found.values())
    assert_row_invariant(OP, arguments, ATTRIBUTES, ["x", "squares"])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16), ATTRIBUTES)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, 2, 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, ATTRIBUTES)
    assert cost.read_bytes == 2 * (6 * 64 + 23 * 64) + 4 * 6
    assert (cost.write_bytes, cost.flops) == (2 * 6 * 23, 6 * 23 * (2 * 64 + 1))
    with pytest.raises(ShapeError, match="axis 0 of weight must be 25"):
        OP(**arguments, **(ATTRIBUTES | {"heads": 4}))
