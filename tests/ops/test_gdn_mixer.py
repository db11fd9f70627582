from __future__ import annotations

import pytest
import torch

from dflash_graph.delta_rule import delta_rule
from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.ops.gdn_mixer import OP
from dflash_graph.tensor import TensorSpec
from dflash_graph.testing import BF16_REDUCTION, F32_REDUCTION, check_op, poison_, same_bytes

HEADS = {"key_heads": 2, "key_dim": 5, "value_heads": 4, "value_dim": 3, "eps": 1e-6}
CHANNELS, SLOTS = 32, 4


def case(rng, dtype, slots, lives, width):
    def random(*shape):
        return torch.randn(shape, generator=rng)

    history = poison_(torch.empty(SLOTS, 3, CHANNELS))
    state = poison_(torch.empty(SLOTS, 4, 3, 5))
    history[slots] = random(len(slots), 3, CHANNELS)
    state[slots] = random(len(slots), 4, 3, 5)
    return {
        "x": random(len(slots), width, CHANNELS).to(dtype),
        "taps_weight": random(CHANNELS, 4).to(dtype),
        "history": history.to(dtype),
        "ba": random(len(slots), width, 8).to(dtype),
        "a_log": random(4),
        "dt_bias": random(4),
        "z": random(len(slots), width, 12).to(dtype),
        "norm": random(3).to(dtype),
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }


def formula(gdn, arguments):
    """The rule's formula in float64, between the ops around it."""
    heads = {name: value for name, value in HEADS.items() if name != "eps"}
    given = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
    names = ("x", "history", "slots")
    q, k, v = get_op("gdn_conv").reference(
        **{n: given[n] for n in names}, weight=given["taps_weight"], **heads
    )
    q, k, v = (part.to(arguments["x"].dtype).double() for part in (q, k, v))
    beta, g = get_op("gdn_gates").reference(
        given["ba"], given["a_log"], given["dt_bias"], value_heads=4
    )
    rule = {"q": q, "k": k, "v": v, "beta": beta, "g": g}
    y = gdn.formula({**rule, **{n: given[n] for n in ("state", "slots", "live")}})["y"]
    u = torch.empty_like(v)
    place = [given[n] for n in ("state", "slots", "live")]
    delta_rule(k, v, beta, g, *place, store=False, corrections=u)
    out = get_op("gated_norm").reference(
        y, given["z"], given["norm"], value_heads=4, value_dim=3, eps=1e-6
    )
    return {"out": out, "k": k, "u": u, "g": g}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_REDUCTION)]
)
@pytest.mark.parametrize(
    ("slots", "lives", "width"), [([3], [1], 1), ([0, 2], [8, 3], 8), ([1], [0], 2)]
)
def test_matches_formula(gdn, rng, dtype, tolerance, slots, lives, width):
    arguments = case(rng, dtype, slots, lives, width)
    oracle = formula(gdn, arguments)
    found = check_op(OP, arguments, HEADS, tolerance, oracle=oracle, opcheck=False)
    for b, live in enumerate(lives):
        assert not found["out"][b, live:].any()


def test_registration(gdn, rng):
    # opcheck compares arguments before and after, so nothing is NaN here.
    arguments = case(rng, torch.bfloat16, [0, 1, 2, 3], [3] * 4, 3)
    check_op(OP, arguments, HEADS, BF16_REDUCTION, oracle=formula(gdn, arguments))


def test_dead_columns_have_no_effect(rng):
    arguments = case(rng, torch.bfloat16, [3, 1], [2, 4], 5)
    whole = OP.reference(**arguments, **HEADS)
    for name in ("x", "ba"):
        poison_(arguments[name][0, 2:])
    for found, expected in zip(OP.reference(**arguments, **HEADS), whole, strict=True):
        assert same_bytes(found[0, :2], expected[0, :2])
        assert same_bytes(found[1], expected[1])


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [1, 2], [3, 3], 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, HEADS)
    columns, kept = 2 * 3, 2 * 3 * 32
    read = 2 * (columns * (32 + 8 + 12) + 32 * 4 + kept + 3) + 4 * (4 + 4 + 2 * 60 + 4)
    assert cost.read_bytes == read
    assert cost.write_bytes == columns * (2 * (12 + 10) + 4 * (12 + 4))
    head = 2 + 30 + 45 + 6 + 30 + 3
    rule = 2 * 2 * 17 + 4 * head
    assert cost.flops == columns * (32 * 10 + 4 * (8 + 8 * 3) + rule) + 4
    wider = {"x": (2, 3, 42), "taps_weight": (42, 4), "history": (SLOTS, 3, 42)}
    wider = {name: TensorSpec(shape, "bfloat16") for name, shape in wider.items()}
    with pytest.raises(ShapeError, match=r"C must be .* = 32, got 42"):
        OP.infer({**specs, **wider}, HEADS)
    with pytest.raises(ShapeError, match="key_heads = 3 must divide value_heads = 4"):
        OP.infer({**specs, **wider}, {**HEADS, "key_heads": 3})
