from __future__ import annotations

import pytest
import torch

from dflash_graph.delta_rule import block_columns, delta_rule_step
from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_fold import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, check_op, poison_, same_bytes

COUNTS = "committed"
SLOTS = 5


def case(rng, dtype, slots, counts, width, *, key_heads=2, heads=4, key_dim=10, value_dim=6):
    """A block whose columns at or after a row's count, and whose other slots, are NaN."""
    batch = len(slots)

    def random(*shape):
        return torch.randn(shape, generator=rng)

    state = poison_(torch.empty(SLOTS, heads, value_dim, key_dim))
    state[slots] = random(batch, heads, value_dim, key_dim)
    block = {
        "q": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "k": (random(batch, width, key_heads, key_dim) * 2.0).to(dtype),
        "v": random(batch, width, heads, value_dim).to(dtype),
        "beta": torch.rand(batch, width, heads, generator=rng),
        "g": -torch.rand(batch, width, heads, generator=rng) * 3.0,
    }
    if counts[0] > 1:
        block["k"][0, 0, 0] = 0.0
        block["g"][0, 1] = torch.tensor([0.0, -200.0] * heads)[:heads]
        block["beta"][0, 1] = torch.tensor([1.0, 0.0] * heads)[:heads]
    for b, count in enumerate(counts):
        for value in block.values():
            poison_(value[b, count:])
    return {
        **block,
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32),
        COUNTS: torch.tensor(counts, dtype=torch.int32),
    }


def formula(arguments):
    """Outputs and states token by token and head by head, in float64."""
    q, k, v, beta, g = (arguments[n].double() for n in ("q", "k", "v", "beta", "g"))
    state = arguments["state"].double().clone()
    batch, width, heads, value_dim = v.shape
    group = heads // k.shape[2]
    y = torch.zeros(batch, width, heads, value_dim, dtype=torch.float64)
    rows = zip(arguments["slots"].tolist(), arguments[COUNTS].tolist(), strict=True)
    for b, (slot, count) in enumerate(rows):
        for h in range(heads):
            s = state[slot, h]
            for i in range(count):
                key, query = k[b, i, h // group], q[b, i, h // group]
                key = key / (key @ key + 1e-6) ** 0.5
                query = query / (query @ query + 1e-6) ** 0.5
                s = g[b, i, h].exp() * s
                s = s + torch.outer(beta[b, i, h] * (v[b, i, h] - s @ key), key)
                y[b, i, h] = s @ query / len(query) ** 0.5
            state[slot, h] = s
    return {"y": y, "state": state}


def records(arguments):
    """The arguments of the fold: all but the queries."""
    return {name: value for name, value in arguments.items() if name != "q"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "committed", "width"),
    [([3], [1], 1), ([0], [8], 8), ([4, 1, 2], [2, 0, 5], 5), ([2, 0, 3], [16, 9, 1], 16)],
)
def test_matches_formula(rng, dtype, slots, committed, width):
    arguments = case(rng, dtype, slots, committed, width)
    oracle, before = formula(arguments)["state"], arguments["state"].clone()
    OP(**records(arguments))
    for slot in range(SLOTS):
        if slot in slots and committed[slots.index(slot)]:
            assert_matches(arguments["state"][slot], oracle[slot], F32_REDUCTION)
        else:
            assert same_bytes(arguments["state"][slot], before[slot])


def test_registration(rng):
    arguments = case(rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3)
    oracle = {"state": formula(arguments)["state"]}
    check_op(OP, records(arguments), {}, F32_REDUCTION, oracle=oracle)


def test_nothing_committed_leaves_the_bytes(rng):
    arguments = records(case(rng, torch.bfloat16, [4, 1], [0, 0], 4))
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
def test_is_verifys_own_trajectory(rng, dtype, key_heads, heads, key_dim, value_dim):
    how = {"key_heads": key_heads, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    arguments = case(rng, dtype, [4, 1, 2], [8, 8, 8], 8, **how)
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


def test_cost_and_contract(rng):
    arguments = records(case(rng, torch.bfloat16, [0, 1], [3, 3], 3))
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, {})
    columns, states = 2 * 3, 4 * 2 * 4 * 60
    assert cost.read_bytes == 2 * columns * (20 + 24) + 4 * columns * 8 + states + 4 * 4
    assert cost.write_bytes == states
    assert cost.flops == columns * (2 * 32 + 4 * (1 + 60 + 120 + 6 + 10 + 120))
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, "k": torch.zeros(2, 3, 3, 10).bfloat16()})
