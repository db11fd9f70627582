from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.conv_history_commit import OP
from dflash_graph.testing import EXACT, check_op, poison_, same_bytes

SLOTS, CHANNELS = 5, 7


def case(rng, dtype, slots, committed, width, depth=3):
    history = torch.randn(SLOTS, depth, CHANNELS, generator=rng)
    history[:, :, 0] = -0.0
    return {
        "columns": torch.randn(len(slots), width, CHANNELS, generator=rng).to(dtype),
        "history": history.to(dtype),
        "slots": torch.tensor(slots, dtype=torch.int32),
        "committed": torch.tensor(committed, dtype=torch.int32),
    }


def pushed(arguments):
    """The history after one column at a time moved in."""
    history = arguments["history"].clone()
    rows = zip(arguments["slots"].tolist(), arguments["committed"].tolist(), strict=True)
    for b, (slot, count) in enumerate(rows):
        for i in range(count):
            history[slot] = torch.cat((history[slot], arguments["columns"][b, i : i + 1]))[1:]
    return history


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "committed", "width"),
    [
        ([2], [1], 1),
        ([2], [0], 1),
        ([0, 4, 3], [2, 0, 1], 2),
        ([0, 4, 3], [2, 3, 4], 5),
        ([1, 0, 2], [16, 8, 0], 16),
    ],
)
@pytest.mark.parametrize("depth", [1, 3])
def test_last_columns(rng, dtype, slots, committed, width, depth):
    arguments = case(rng, dtype, slots, committed, width, depth)
    oracle = {"history": pushed(arguments)}
    opcheck = depth == 3 and width == 5
    found = check_op(OP, arguments, {}, EXACT, oracle=oracle, opcheck=opcheck)
    assert same_bytes(found["history"], oracle["history"])


def test_touches_no_other_byte(rng):
    arguments = case(rng, torch.bfloat16, [4, 1, 3], [2, 0, 5], 8)
    for slot in (0, 1, 2):
        poison_(arguments["history"][slot])
    for b, count in enumerate((2, 0, 5)):
        poison_(arguments["columns"][b, count:])
    expected = pushed(arguments)
    OP(**arguments)
    assert same_bytes(arguments["history"], expected)
    assert bool(expected[[3, 4]].isfinite().all())


def test_two_commits_equal_one(rng):
    whole = case(rng, torch.float32, [2], [7], 8)
    parts = {name: value.clone() for name, value in whole.items()}
    OP(**whole)
    OP(**{**parts, "committed": torch.tensor([2], dtype=torch.int32)})
    rest = {**parts, "columns": parts["columns"][:, 2:].contiguous()}
    OP(**{**rest, "committed": torch.tensor([5], dtype=torch.int32)})
    assert same_bytes(parts["history"], whole["history"])


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [0, 1], [0, 0], 2)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {})  # two of three columns are new, one stays
    assert cost.read_bytes == 2 * 2 * (2 + 1) * 7 + 4 * 4
    assert (cost.write_bytes, cost.flops) == (2 * 2 * 3 * 7, 0)
    with pytest.raises(ShapeError, match=r"axis 2 of history must be 7 \(C from axis 2 of col"):
        OP(**{**arguments, "history": torch.zeros(5, 3, 6, dtype=torch.bfloat16)})
