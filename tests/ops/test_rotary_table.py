from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.rotary_table import OP
from dflash_graph.testing import (
    EXACT,
    F32_ELEMENTWISE,
    F32_REDUCTION,
    assert_matches,
    assert_traceable,
    check_op,
    same_bytes,
)

MROPE = {"rotary_half": 32, "theta": 1e7, "sections": (11, 11, 10)}
SCALAR = {"rotary_half": 20, "theta": 1e4, "sections": ()}


def positions(rng, axes, batch=3, width=8, limit=2**18):
    return torch.randint(limit, (axes, batch, width), generator=rng, dtype=torch.int32)


def angle(places, c, rotary_half, theta, sections):
    axis = 0
    if sections and c % 3 == 1 and c < 3 * sections[1]:
        axis = 1
    if sections and c % 3 == 2 and c < 3 * sections[2]:
        axis = 2
    return places[axis] * theta ** (-c / rotary_half)


@pytest.mark.parametrize(("axes", "attributes"), [(3, MROPE), (1, SCALAR)])
def test_matches_formula(rng, axes, attributes):
    table = positions(rng, axes)
    table[:, 0, 0] = 0
    oracle = {
        name: torch.tensor(
            [
                [
                    [function(angle(p, c, **attributes)) for c in range(attributes["rotary_half"])]
                    for p in row
                ]
                for row in table.permute(1, 2, 0).tolist()
            ],
            dtype=torch.float64,
        )
        for name, function in (("cos", math.cos), ("sin", math.sin))
    }
    found = check_op(OP, {"positions": table}, attributes, F32_ELEMENTWISE, oracle=oracle)
    assert bool((found["cos"][0, 0] == 1.0).all()) and not found["sin"][0, 0].any()


def test_equals_transformers(rng):
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = Qwen3_5TextConfig(
        head_dim=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    )
    table = positions(rng, 3, limit=64)
    expected = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(3, 8, 1), table.long())
    for found, oracle in zip(OP.reference(table, **MROPE), expected, strict=True):
        assert_matches(found, oracle[..., :32], F32_REDUCTION)  # its angles are float32
        assert_matches(found, oracle[..., 32:], F32_REDUCTION)


def test_equal_axes_are_scalar_positions(rng):
    table = positions(rng, 1)
    scalar = OP.reference(table, **{**MROPE, "sections": ()})
    for left, right in zip(OP.reference(table.expand(3, -1, -1), **MROPE), scalar, strict=True):
        assert_matches(left, right, EXACT)


@pytest.mark.parametrize(("axes", "attributes"), [(3, MROPE), (1, SCALAR)])
def test_row_invariant_and_traceable(rng, axes, attributes):
    table = positions(rng, axes, width=16)
    whole = OP.reference(table, **attributes)
    for b in range(3):
        for i in range(16):
            alone = OP.reference(table[:, b : b + 1, i : i + 1].clone(), **attributes)
            for left, right in zip(alone, whole, strict=True):
                assert same_bytes(left, right[b : b + 1, i : i + 1])
    assert_traceable(OP, {"positions": table}, attributes)


def test_cost():
    spec = spec_of(torch.zeros(3, 2, 5, dtype=torch.int32))
    cost = OP.cost({"positions": spec}, MROPE)
    assert (cost.read_bytes, cost.write_bytes, cost.flops) == (4 * 30, 2 * 4 * 320, 3 * 320)


@pytest.mark.parametrize(
    ("axes", "sections", "message"),
    [
        (3, (), "must have 1 axis without sections, got 3"),
        (1, (11, 11, 10), "must have 3 axes with sections, got 1"),
        (3, (11, 11, 11), r"sum to rotary_half = 32, got \(11, 11, 11\)"),
        (3, (16, 16), r"must be three .* got \(16, 16\)"),
        (3, (-1, 17, 16), "must be three"),
    ],
)
def test_contract(axes, sections, message):
    spec = spec_of(torch.zeros(axes, 1, 1, dtype=torch.int32))
    with pytest.raises(ShapeError, match=message):
        OP.infer({"positions": spec}, {**MROPE, "sections": sections})
