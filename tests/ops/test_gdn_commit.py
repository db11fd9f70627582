from __future__ import annotations

import pytest
import torch

from dflash_graph.delta_rule import delta_rule
from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.ops.gdn_commit import OP
from dflash_graph.testing import F32_REDUCTION, assert_matches, poison_, same_bytes

LISTS = ("columns", "k", "u", "g", "states", "histories")
CHANNELS = 7


def case(gdn, rng, dtype, slots, committed, width, layers=2):
    """What the rule of each layer was given, and the call: layers of `gdn.case` with corrections
    and histories; columns that are not committed are NaN."""
    rules, found = [], {name: [] for name in LISTS}
    for _ in range(layers):
        layer = gdn.case(rng, dtype, slots, committed, width, counted="committed")
        layer["columns"] = torch.randn(len(slots), width, CHANNELS, generator=rng).to(dtype)
        for b, count in enumerate(committed):
            poison_(layer["columns"][b, count:])
        u = torch.empty(layer["v"].shape)
        rule = [layer[n] for n in ("k", "v", "beta", "g", "state", "slots", "committed")]
        delta_rule(*rule, store=False, corrections=u)
        for b, count in enumerate(committed):
            poison_(u[b, count:])
        layer["u"], layer["rule"] = u, {n: layer[n] for n in ("k", "v", "beta", "g")}
        layer["states"] = layer["state"]
        layer["histories"] = torch.randn(5, 3, CHANNELS, generator=rng).to(dtype)
        for name in LISTS:
            found[name].append(layer[name])
        rules.append(layer["rule"])
    return rules, {**found, "slots": layer["slots"], "committed": layer["committed"]}


def copies(arguments):
    return {
        n: [t.clone() for t in v] if isinstance(v, list) else v.clone()
        for n, v in arguments.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("slots", "committed", "width"), [([3], [1], 1), ([4, 1, 2], [2, 0, 5], 5)]
)
def test_is_fold_and_history_of_every_layer(gdn, rng, dtype, slots, committed, width):
    rules, arguments = case(gdn, rng, dtype, slots, committed, width)
    found = copies(arguments)
    assert OP(**found, layers=2) is None
    place = {name: arguments[name] for name in ("slots", "committed")}
    for layer in range(2):
        one = {n: arguments[n][layer] for n in LISTS}
        rule = rules[layer]
        oracle = gdn.formula({**rule, "q": rule["k"], "state": one["states"], **place})["state"]
        for slot, count in zip(slots, committed, strict=True):
            if count:
                assert_matches(found["states"][layer][slot], oracle[slot], F32_REDUCTION)
        get_op("gdn_fold").reference(**rule, state=one["states"], **place)
        get_op("conv_history_commit").reference(one["columns"], one["histories"], **place)
        assert same_bytes(found["states"][layer], one["states"])
        assert same_bytes(found["histories"][layer], one["histories"])
    for name in LISTS[:4]:
        assert all(map(same_bytes, found[name], arguments[name])), name


def test_registration(gdn, rng):
    # opcheck compares arguments before and after, so nothing is NaN here.
    _, arguments = case(gdn, rng, torch.bfloat16, [0, 1, 2, 3, 4], [3] * 5, 3)
    torch.library.opcheck(torch.ops.dflash_graph.gdn_commit.default, (*arguments.values(), 2))


def test_nothing_committed_leaves_the_bytes(gdn, rng):
    _, arguments = case(gdn, rng, torch.bfloat16, [4, 1], [0, 0], 4)
    for value in (*arguments["states"], *arguments["histories"]):
        poison_(value[1])
    found = copies(arguments)
    OP(**found, layers=2)
    for name in LISTS:
        assert all(map(same_bytes, found[name], arguments[name])), name


def test_cost_and_contract(gdn, rng):
    _, arguments = case(gdn, rng, torch.bfloat16, [0, 1], [2, 2], 2)
    specs = {
        n: tuple(map(spec_of, v)) if isinstance(v, list) else spec_of(v)
        for n, v in arguments.items()
    }
    cost = OP.cost(specs, {"layers": 2})
    columns, states = 2 * 2, 4 * 2 * 4 * 60
    layer = 2 * columns * 20 + 4 * columns * (24 + 4) + states
    layer += 2 * 2 * (2 + 1) * 7  # two of three columns are new, one stays
    assert cost.read_bytes == 2 * layer + 4 * 4
    assert cost.write_bytes == 2 * (states + 2 * 2 * 3 * 7)
    assert cost.flops == 2 * columns * 4 * (1 + 3 * 60)
    with pytest.raises(
        ShapeError, match=r"gdn_commit.columns: expected 3 tensors \(layers\), got 2"
    ):
        OP(**arguments, layers=3)
    with pytest.raises(ShapeError, match="Hk = 3 must divide Hv = 4"):
        OP(**{**arguments, "k": [torch.zeros(2, 2, 3, 10).bfloat16()] * 2}, layers=2)
