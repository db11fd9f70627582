from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.ops.context_rings import OP
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, assert_matches, poison_, same_bytes

HEADS = {"kv_heads": 2, "head_dim": 8, "rotary_half": 3, "eps": 1e-6}
LAYERS, SLOTS, WINDOW = 2, 4, 6
ATTRIBUTES = {"layers": LAYERS, **HEADS}
LISTS = ("weights", "k_norms", "k_rings", "v_rings")


def case(rng, dtype, slots, starts, lives, columns):
    def random(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    angles = torch.rand(len(slots), columns, 3, generator=rng) * 2 * math.pi
    return {
        "c": random(len(slots), columns, 20),
        "weights": [random(32, 20) for _ in range(LAYERS)],
        "k_norms": [random(8) for _ in range(LAYERS)],
        "cos": angles.cos(),
        "sin": angles.sin(),
        "k_rings": [random(SLOTS, WINDOW, 2, 8) for _ in range(LAYERS)],
        "v_rings": [random(SLOTS, WINDOW, 2, 8) for _ in range(LAYERS)],
        "slots": torch.tensor(slots, dtype=torch.int32),
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def formula(arguments):
    """Keys and values from their op, which has an oracle of its own; places one by one."""
    wide = {
        n: [t.double() for t in v] if isinstance(v, list) else v.double()
        for n, v in arguments.items()
    }
    rings = {name: [ring.clone() for ring in wide[name]] for name in ("k_rings", "v_rings")}
    rows = (arguments[name].tolist() for name in ("slots", "start", "live"))
    rows = list(zip(*rows, strict=True))
    for layer in range(LAYERS):
        made = get_op("context_kv").reference(
            wide["c"],
            wide["weights"][layer],
            wide["k_norms"][layer],
            wide["cos"],
            wide["sin"],
            **HEADS,
            tiled=True,
        )
        for name, block in zip(rings, made, strict=True):
            for b, (slot, start, live) in enumerate(rows):
                for i in range(live):
                    rings[name][layer][slot, (start + i) % WINDOW] = block[b, i]
    return rings


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
@pytest.mark.parametrize(
    ("slots", "starts", "lives", "columns"),
    [([2], [100], [1], 1), ([1, 3, 0], [4, 0, 17], [5, 0, 7], 8)],
)
def test_matches_formula(rng, dtype, tolerance, slots, starts, lives, columns):
    arguments = case(rng, dtype, slots, starts, lives, columns)
    oracle, found = formula(arguments), copies(arguments)
    assert OP(**found, **ATTRIBUTES) is None
    for name, rings in oracle.items():
        for ring, expected in zip(found[name], rings, strict=True):
            assert_matches(ring, expected, tolerance, name)
    for name, value in arguments.items():
        if name not in OP.updated:
            pairs = (
                zip(value, found[name], strict=True) if name in LISTS else [(value, found[name])]
            )
            assert all(same_bytes(a, b) for a, b in pairs), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_context_kv_and_ring_append_of_every_layer(rng, dtype):
    """Also in every byte that is not written: rings and dead columns are NaN before."""
    arguments = case(rng, dtype, [1, 3, 0], [4, 0, 17], [5, 0, 8], 8)
    poison_(arguments["c"][0, 5:])
    poison_(arguments["c"][1])
    for name in ("k_rings", "v_rings"):
        for ring in arguments[name]:
            poison_(ring)
    found = copies(arguments)
    OP(**found, **ATTRIBUTES)
    place = {name: arguments[name] for name in ("slots", "start", "live")}
    for layer in range(LAYERS):
        weight, norm, k_ring, v_ring = (arguments[name][layer] for name in LISTS)
        turned = [arguments[name] for name in ("cos", "sin")]
        k, v = get_op("context_kv").reference(
            arguments["c"], weight, norm, *turned, **HEADS, tiled=True
        )
        get_op("ring_append").reference(k, v, k_ring, v_ring, **place)
        assert same_bytes(found["k_rings"][layer], k_ring)
        assert same_bytes(found["v_rings"][layer], v_ring)
        assert k_ring.isfinite().all(-1).all(-1).sum(-1).tolist() == [WINDOW, 5, 0, 0]


def test_registration(rng):
    arguments = case(rng, torch.bfloat16, [1, 3], [4, 0], [3, 2], 3)
    values = (*arguments.values(), *ATTRIBUTES.values())
    torch.library.opcheck(torch.ops.dflash_graph.context_rings.default, values)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [0, 1], [0, 0], [8, 8], 8)
    specs = {
        n: tuple(map(spec_of, v)) if isinstance(v, list) else spec_of(v)
        for n, v in arguments.items()
    }
    cost = OP.cost(specs, ATTRIBUTES)
    read = 2 * (16 * 20 + LAYERS * (32 * 20 + 8)) + 4 * (2 * 16 * 3 + 6)
    assert cost.read_bytes == read
    assert cost.write_bytes == 2 * LAYERS * 2 * (2 * WINDOW * 2 * 8)
    assert cost.flops == LAYERS * 16 * 2 * (4 * 8 * 20 + 4 * 8 + 6 * 3)
    with pytest.raises(
        ShapeError, match=r"context_rings.weights: expected 3 tensors \(layers\), got 2"
    ):
        OP(**arguments, **(ATTRIBUTES | {"layers": 3}))
    with pytest.raises(ShapeError, match=r"2\*5 channels is wider than a head of 8"):
        wide = spec_of(torch.empty(2, 8, 5))
        OP.infer({**specs, "cos": wide, "sin": wide}, ATTRIBUTES | {"rotary_half": 5})


def copies(arguments):
    return {
        n: [t.clone() for t in v] if isinstance(v, list) else v.clone()
        for n, v in arguments.items()
    }
