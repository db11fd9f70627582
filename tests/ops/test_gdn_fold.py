from __future__ import annotations

import pytest
import torch

from dflash_graph.delta_rule import block_columns, delta_rule_step
from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_fold import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, check_op, poison_, same_bytes

SLOTS = 5


def records(arguments):
    """The arguments of the fold: all but the queries."""
    return {name: value for name, value in arguments.items() if name != "q"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "committed", "width"),
    [([3], [1], 1), ([0], [8], 8), ([4, 1, 2], [2, 0, 5], 5), ([2, 0, 3], [16, 9, 1], 16)],
)
def test_matches_formula(gdn, rng, dtype, slots, committed, width):
    arguments = gdn.case(rng, dtype, slots, committed, width, counted="committed")
    oracle, before = gdn.formula(arguments)["state"], arguments["state"].clone()
    OP(**records(arguments))
    for slot in range(SLOTS):
        if slot in slots and committed[slots.index(slot)]:
            assert_matches(arguments["state"][slot], oracle[slot], F32_REDUCTION)
        else:
            assert same_bytes(arguments["state"][slot], before[slot])


def test_registration(gdn, rng):
    arguments = gdn.case(rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3, counted="committed")
    oracle = {"state": gdn.formula(arguments)["state"]}
    check_op(OP, records(arguments), {}, F32_REDUCTION, oracle=oracle)


def test_nothing_committed_leaves_the_bytes(gdn, rng):
    arguments = records(gdn.case(rng, torch.bfloat16, [4, 1], [0, 0], 4, counted="committed"))
    arguments["state"][4] = -0.0
    poison_(arguments["state"][1])
    before = arguments["state"].clone()
    OP(**arguments)
    assert same_bytes(arguments["state"], before)


@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    [(2, 4, 10, 6), (1, 1, 64, 64), (2, 4, 64, 64), (1, 3, 7, 5)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_verifys_own_trajectory(gdn, rng, dtype, key_heads, heads, key_dim, value_dim):
    how = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    arguments = gdn.case(rng, dtype, [4, 1, 2], [8, 8, 8], 8, **how, counted="committed")
    block = {name: arguments[name] for name in ("k", "v", "beta", "g", "q")}
    # The three requests' states as verify has them after each column, in one company.
    states = arguments["state"][arguments["slots"].long()].flatten(0, 1)
    trajectory = []
    for column in block_columns(**block, dtype=torch.float32):
        delta_rule_step(states, column, torch.empty(3 * heads, value_dim, 1))
        trajectory.append(states.view(3, heads, value_dim, key_dim).clone())
    steps = {name: value.clone() for name, value in records(arguments).items()}
    for count in range(1, 9):
        folded = {name: value.clone() for name, value in records(arguments).items()}
        counts = [count, 0, 9 - count]
        OP(**{**folded, "committed": torch.tensor(counts, dtype=torch.int32)})
        assert same_bytes(folded["state"][4], trajectory[count - 1][0])
        assert same_bytes(folded["state"][1], arguments["state"][1])
        assert same_bytes(folded["state"][2], trajectory[8 - count][2])
        # One request and one column at a time.
        one = {
            n: v[:1, count - 1 : count] if n in block else v[:1] if n == "slots" else v
            for n, v in steps.items()
        }
        OP.reference(**{**one, "committed": torch.ones(1, dtype=torch.int32)})
        assert same_bytes(steps["state"][4], folded["state"][4])


def test_cost_and_contract(gdn, rng):
    arguments = records(gdn.case(rng, torch.bfloat16, [0, 1], [3, 3], 3, counted="committed"))
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {})
    columns, states = 2 * 3, 4 * 2 * 4 * 60
    assert cost.read_bytes == 2 * columns * (20 + 24) + 4 * columns * 8 + states + 4 * 4
    assert cost.write_bytes == states
    assert cost.flops == columns * (2 * 32 + 4 * (2 + 60 + 120 + 12 + 120))
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, "k": torch.zeros(2, 3, 3, 10).bfloat16()})
