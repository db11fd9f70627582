"""The kernels of Gated DeltaNet layers on a device: formula, bits, and the fold's trajectory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.delta_rule import delta_rule, replay
from dflash_graph.ops import get_op
from dflash_graph.testing import (
    BF16_REDUCTION,
    F32_REDUCTION,
    Tolerance,
    assert_matches,
    poison_,
    same_bytes,
)

pytestmark = pytest.mark.gpu

Run = Callable[..., dict[str, Any]]
Geometry = tuple[int, int, int, int]
MIXER, COMMIT = get_op("gdn_mixer"), get_op("gdn_commit")
SLOTS = 9
RECORDS = ("k", "u", "g")
#: (key heads, value heads, key dim, value dim)
LARGE, DEMO, ODD = (16, 48, 128, 128), (2, 4, 64, 64), (2, 6, 40, 72)
DTYPES = [(torch.bfloat16, BF16_REDUCTION), (torch.float32, F32_REDUCTION)]


def normal(rng: torch.Generator, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=rng) * scale).to(dtype).cuda()


def mixer_case(
    rng: torch.Generator,
    slots: Sequence[int],
    lives: Sequence[int],
    width: int,
    geometry: Geometry,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A call; the state of slots that it does not name is NaN."""
    key_heads, heads, key_dim, value_dim = geometry
    batch, channels = len(slots), 2 * key_heads * key_dim + heads * value_dim
    history = poison_(torch.empty(SLOTS, 3, channels, dtype=dtype, device="cuda"))
    state = poison_(torch.empty(SLOTS, heads, value_dim, key_dim, device="cuda"))
    history[list(slots)] = normal(rng, batch, 3, channels, dtype=dtype)
    state[list(slots)] = normal(rng, batch, heads, value_dim, key_dim, dtype=torch.float32)
    case = {
        "x": normal(rng, batch, width, channels, dtype=dtype),
        "taps_weight": normal(rng, channels, 4, dtype=dtype, scale=0.5),
        "history": history,
        "ba": normal(rng, batch, width, 2 * heads, dtype=dtype, scale=2.0),
        "a_log": normal(rng, heads, dtype=torch.float32),
        "dt_bias": normal(rng, heads, dtype=torch.float32),
        "z": normal(rng, batch, width, heads * value_dim, dtype=dtype),
        "norm": normal(rng, value_dim, dtype=dtype),
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32, device="cuda"),
        "live": torch.tensor(lives, dtype=torch.int32, device="cuda"),
    }
    heads_of = {
        "key_heads": key_heads,
        "key_dim": key_dim,
        "value_heads": heads,
        "value_dim": value_dim,
    }
    return case, {**heads_of, "eps": 1e-6}


def oracle(case: Mapping[str, Tensor], k: Tensor, heads: Any) -> tuple[Tensor, Tensor]:
    """The output and the corrections in float64, with q, k and v rounded once: k as the run had it,
    q and v by the reference."""
    wide = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    eps, sizes = heads["eps"], {n: v for n, v in heads.items() if n != "eps"}
    q, _, v = get_op("gdn_conv").reference(
        case["x"], case["taps_weight"], case["history"], case["slots"], **sizes
    )
    gates = (wide["ba"], wide["a_log"], wide["dt_bias"])
    beta, g = get_op("gdn_gates").reference(*gates, value_heads=heads["value_heads"])
    u = torch.empty_like(v, dtype=torch.float64)
    rule = (k.double(), v.double(), beta, g, wide["state"], wide["slots"], wide["live"])
    y = delta_rule(*rule, q=q.double(), store=False, corrections=u)
    assert y is not None
    value = {"value_heads": heads["value_heads"], "value_dim": heads["value_dim"]}
    return get_op("gated_norm").reference(y, wide["z"], wide["norm"], **value, eps=eps), u


def requests(case: Mapping[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    per_request = ("x", "ba", "z", "slots", "live")
    return {n: v[rows].contiguous() if n in per_request else v for n, v in case.items()}


def columns(case: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    cut = {n: case[n][:, start:stop].contiguous() for n in ("x", "ba", "z")}
    return {**case, **cut, "live": (case["live"] - start).clamp(0, stop - start)}


def commit_case(
    layers: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]], committed: Sequence[int]
) -> dict[str, Any]:
    """The commit of blocks that the mixer has run: a call and its records for every layer."""
    first = layers[0][0]
    return {
        "columns": [case["x"] for case, _ in layers],
        **{name: [records[name] for _, records in layers] for name in RECORDS},
        "states": [case["state"] for case, _ in layers],
        "histories": [case["history"] for case, _ in layers],
        "slots": first["slots"],
        "committed": torch.tensor(committed, dtype=torch.int32, device="cuda"),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("geometry", [LARGE, DEMO, ODD])
@pytest.mark.parametrize(
    ("slots", "lives"),
    [([4], [8]), ([7], [1]), ([8, 0, 3, 5, 1, 2, 6, 7], [16, 8, 1, 0, 5, 5, 5, 5])],
)
def test_mixer(
    rng: torch.Generator,
    run: Run,
    dtype: torch.dtype,
    tolerance: Tolerance,
    geometry: Geometry,
    slots: list[int],
    lives: list[int],
) -> None:
    """Outputs and records against the formula; zeros in dead columns."""
    case, heads = mixer_case(rng, slots, lives, max(lives), geometry, dtype)
    found = run(MIXER, case, heads)
    sizes = {name: value for name, value in heads.items() if name != "eps"}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in case.items()}
    _, k, _ = get_op("gdn_conv").reference(
        wide["x"], wide["taps_weight"], wide["history"], wide["slots"], **sizes
    )
    gates = (wide["ba"], wide["a_log"], wide["dt_bias"])
    _, g = get_op("gdn_gates").reference(*gates, value_heads=heads["value_heads"])
    assert_matches(found["k"], k, tolerance, "k")
    assert_matches(found["g"], g, F32_REDUCTION, "g")
    out, u = oracle(case, found["k"], heads)
    assert_matches(found["u"], u, tolerance, "u")
    assert_matches(found["out"], out, tolerance, "out")
    for b, live in enumerate(lives):
        assert not found["out"][b, live:].any() and not found["u"][b, live:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("geometry", [LARGE, DEMO, ODD])
def test_mixer_row_invariant(
    rng: torch.Generator, run: Run, dtype: torch.dtype, geometry: Geometry
) -> None:
    lives = [16, 11, 5]
    case, heads = mixer_case(rng, [3, 8, 0], lives, 16, geometry, dtype)
    whole = run(MIXER, case, heads)
    for name, value in run(MIXER, requests(case, [2, 1, 0]), heads).items():
        assert same_bytes(value.flip(0), whole[name]), f"{name}: requests in reverse"
    for b in range(3):
        for stop in (1, 2, 7, 8, 9, 16):
            cut = columns(requests(case, [b]), 0, stop)
            for name, value in run(MIXER, cut, heads).items():
                assert same_bytes(value, whole[name][b : b + 1, :stop]), f"{name}, {stop} columns"
    for name in ("x", "ba"):
        for b, live in enumerate(lives):
            poison_(case[name][b, live:])
    dead = run(MIXER, case, heads)
    assert same_bytes(dead["out"], whole["out"]) and same_bytes(dead["u"], whole["u"])
    for b, live in enumerate(lives):
        for name in RECORDS:
            assert same_bytes(dead[name][b, :live], whole[name][b, :live]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("geometry", [LARGE, DEMO, ODD])
def test_commit_goes_on_with_the_bits(
    rng: torch.Generator, run: Run, dtype: torch.dtype, geometry: Geometry
) -> None:
    """For every N: N columns at once or one at a time leave the same bytes, and column N of a block
    from the old state is what a block of one gives from the new.
    """
    width = 10
    case, heads = mixer_case(rng, [5, 2], [width] * 2, width, geometry, dtype)
    whole = run(MIXER, case, heads)
    steps = dict(case)
    for count in range(width + 1):
        committed = commit_case([(case, whole)], [count] * 2)
        found = run(COMMIT, committed, {"layers": 1})
        after = {"state": found["states"][0], "history": found["histories"][0]}
        for name, value in after.items():
            assert same_bytes(value, steps[name]), f"{name} after {count} columns"
        if count == width:
            break
        one = {**columns(case, count, count + 1), **after}
        alone = run(MIXER, one, heads)
        for name, value in alone.items():
            assert same_bytes(value, whole[name][:, count : count + 1]), f"{name}, column {count}"
        found = run(COMMIT, commit_case([(one, alone)], [1, 1]), {"layers": 1})
        steps = {"state": found["states"][0], "history": found["histories"][0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("geometry", [LARGE, DEMO, ODD])
def test_commit(rng: torch.Generator, run: Run, dtype: torch.dtype, geometry: Geometry) -> None:
    """Layers against the reference; what is not committed has no effect, other slots stay."""
    slots, committed, width = [8, 1, 4], [16, 0, 3], 16
    layers = []
    for _ in range(3):
        case, heads = mixer_case(rng, slots, [width] * 3, width, geometry, dtype)
        records = run(MIXER, case, heads)
        for b, count in enumerate(committed):
            for value in (case["x"], *(records[name] for name in RECORDS)):
                poison_(value[b, count:])
        layers.append((case, records))
    call = commit_case(layers, committed)
    found = run(COMMIT, call, {"layers": 3})
    place = {name: call[name] for name in ("slots", "committed")}
    for layer, (case, records) in enumerate(layers):
        state, history = case["state"].double(), case["history"].clone()
        rule = (records["k"].double(), records["u"].double(), records["g"].double())
        replay(*rule, state, call["slots"], call["committed"])
        get_op("conv_history_commit").reference(case["x"], history, **place)
        assert_matches(found["states"][layer][[8, 4]], state[[8, 4]], F32_REDUCTION)
        others = [slot for slot in range(SLOTS) if slot not in (8, 4)]
        assert same_bytes(found["states"][layer][others], case["state"][others])
        assert same_bytes(found["histories"][layer], history)
