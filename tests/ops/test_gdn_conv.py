from __future__ import annotations

import math

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.op import spec_of
from dflash_graph.ops.gdn_conv import OP
from dflash_graph.testing import (
    BF16_ELEMENTWISE,
    F32_ELEMENTWISE,
    assert_traceable,
    check_op,
    poison_,
    same_bytes,
)

HEADS = {"key_heads": 2, "key_dim": 5, "value_heads": 4, "value_dim": 3}
CHANNELS = 32
SLOTS = 5


def case(rng, dtype, slots, width, taps=4):
    history = poison_(torch.empty(SLOTS, taps - 1, CHANNELS))
    history[slots] = torch.randn(len(slots), taps - 1, CHANNELS, generator=rng)
    x = torch.randn(len(slots), width, CHANNELS, generator=rng)
    x[0, 0, :3] = torch.tensor([0.0, 300.0, -300.0])
    return {
        "x": x.to(dtype),
        "weight": torch.randn(CHANNELS, taps, generator=rng).to(dtype),
        "history": history.to(dtype),
        "slots": torch.tensor(slots, dtype=torch.int32),
    }


def formula(arguments):
    x, weight, history = (arguments[n].double().tolist() for n in ("x", "weight", "history"))
    out = []
    for slot, row in zip(arguments["slots"].tolist(), x, strict=True):
        stream = history[slot] + row
        for i in range(len(row)):
            for channel, taps in enumerate(weight):
                c = sum(w * stream[i + t][channel] for t, w in enumerate(taps))
                out.append(c / (1.0 + math.exp(-c)) if c > -700.0 else 0.0)
    out = torch.tensor(out, dtype=torch.float64).view(*arguments["x"].shape)
    q, k, v = out.split((10, 10, 12), dim=-1)
    return {"q": q.unflatten(2, (2, 5)), "k": k.unflatten(2, (2, 5)), "v": v.unflatten(2, (4, 3))}


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, F32_ELEMENTWISE), (torch.bfloat16, BF16_ELEMENTWISE)],
)
def test_matches_formula(rng, dtype, tolerance, taps):
    for slots, width in (([3], 1), ([4, 0, 2], 8)):
        arguments = case(rng, dtype, slots, width, taps)
        oracle = formula(arguments)
        found = check_op(OP, arguments, HEADS, tolerance, oracle=oracle, opcheck=False)
        assert all(value.is_contiguous() for value in found.values())


def test_registration(rng):
    # opcheck compares arguments before and after, so the history holds no NaN here.
    arguments = case(rng, torch.bfloat16, [0, 1, 2, 3, 4], 5)
    check_op(OP, arguments, HEADS, BF16_ELEMENTWISE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariant(rng, dtype):
    arguments = case(rng, dtype, [4, 0, 2], 16)
    whole = OP.reference(**arguments, **HEADS)
    history = arguments["history"].clone()
    for b, slot in enumerate(arguments["slots"].tolist()):
        for i in range(16):  # as plain decoding, with the history moving on
            one = {
                **arguments,
                "x": arguments["x"][b : b + 1, i : i + 1].clone(),
                "slots": arguments["slots"][b : b + 1],
                "history": history,
            }
            for alone, block in zip(OP.reference(**one, **HEADS), whole, strict=True):
                assert same_bytes(alone[0, 0], block[b, i])
            history[slot] = torch.cat((history[slot, 1:], arguments["x"][b, i : i + 1]))
    turned = {**arguments, "x": arguments["x"].flip(0)[:, :5], "slots": arguments["slots"].flip(0)}
    for other, block in zip(OP.reference(**turned, **HEADS), whole, strict=True):
        assert same_bytes(other.flip(0), block[:, :5])


def test_traceable(rng):
    assert_traceable(OP, case(rng, torch.bfloat16, [4, 0, 2], 8), HEADS)


def test_cost_and_contract(rng):
    arguments = case(rng, torch.bfloat16, [1, 2], 3)
    specs = {name: spec_of(value) for name, value in arguments.items()}
    cost = OP.cost(specs, HEADS)
    assert cost.read_bytes == 2 * (2 * 3 * 32 + 32 * 4 + 2 * 3 * 32) + 4 * 2
    assert (cost.write_bytes, cost.flops) == (2 * 2 * 3 * 32, 2 * 3 * 32 * 10)
    with pytest.raises(ShapeError, match=r"C must be .* = 35, got 32"):
        OP.infer(specs, {**HEADS, "value_heads": 5})
    short = spec_of(torch.zeros(SLOTS, 4, CHANNELS, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match=r"axis 1 of history must be 3 \(taps-1\), got 4"):
        OP.infer({**specs, "history": short}, HEADS)
