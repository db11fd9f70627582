from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.ring_append import OP
from dflash_graph.testing import EXACT, check_op, poison_, same_bytes

SLOTS, WINDOW, HEADS, DIM = 4, 6, 2, 5


def case(rng, dtype, slots, starts, lives, width):
    def random(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    return {
        "k": random(len(slots), width, HEADS, DIM),
        "v": random(len(slots), width, HEADS, DIM),
        "k_ring": random(SLOTS, WINDOW, HEADS, DIM),
        "v_ring": random(SLOTS, WINDOW, HEADS, DIM),
        "slots": torch.tensor(slots, dtype=torch.int32),
        "start": torch.tensor(starts, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def stored(arguments):
    """Both rings after one assignment per live column, oldest first."""
    rings = {name: arguments[f"{name}_ring"].clone() for name in "kv"}
    rows = (arguments[name].tolist() for name in ("slots", "start", "live"))
    for b, (slot, start, live) in enumerate(zip(*rows, strict=True)):
        for i in range(live):
            for name, ring in rings.items():
                ring[slot, (start + i) % WINDOW] = arguments[name][b, i]
    return {f"{name}_ring": ring for name, ring in rings.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "starts", "lives", "width"),
    [
        ([2], [0], [1], 1),
        ([3], [100], [8], 8),
        ([1, 3, 0], [4, 0, 17], [WINDOW - 1, 0, WINDOW], 8),
        ([0, 2, 1], [5, 6, 7], [WINDOW + 1, 16, 2], 16),
    ],
)
def test_places(rng, dtype, slots, starts, lives, width):
    arguments = case(rng, dtype, slots, starts, lives, width)
    check_op(OP, arguments, {}, EXACT, oracle=stored(arguments), opcheck=width == 16)


def test_touches_no_other_byte(rng):
    arguments = case(rng, torch.bfloat16, [1, 3, 0], [4, 0, 17], [3, 0, 13], 16)
    for name in ("k_ring", "v_ring"):
        poison_(arguments[name])
    for name in ("k", "v"):
        poison_(arguments[name][0, 3:])
        poison_(arguments[name][1])
        poison_(arguments[name][2, : 13 - WINDOW])  # older than the last window
        poison_(arguments[name][2, 13:])
    expected = stored(arguments)
    OP(**arguments)
    for name, ring in expected.items():
        assert same_bytes(arguments[name], ring)
        assert ring.isfinite().all(-1).all(-1).sum(-1).tolist() == [WINDOW, 3, 0, 0]


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [0, 1], [0, 0], [8, 8], 8)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    stored_bytes = 2 * 2 * (2 * WINDOW * HEADS * DIM)
    cost = OP.cost(specs, {}, context=3)
    assert cost.read_bytes == stored_bytes + 4 * 6
    assert (cost.write_bytes, cost.flops) == (stored_bytes, 0)
    with pytest.raises(ShapeError, match=r"axis 1 of v_ring must be 6 \(window"):
        OP(**{**arguments, "v_ring": torch.zeros(4, 7, 2, 5, dtype=torch.bfloat16)})
