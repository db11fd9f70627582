"""The kernels of Gated DeltaNet layers at small geometry in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from dflash_graph.errors import ShapeError
from dflash_graph.kernels import Choice, kernel_case
from dflash_graph.op import spec_of
from dflash_graph.ops import get_op
from dflash_graph.testing import F32_REDUCTION, Tolerance, assert_matches, poison_, same_bytes

MIXER, COMMIT = get_op("gdn_mixer"), get_op("gdn_commit")
RECORDS = ("k", "u", "g")
SLOTS, EPS = 4, 1e-6
#: Cuts of bfloat16 instead of roundings: of q, k and v, then of the result.
BF16_CUTS = Tolerance(3e-2, 3e-2, 2e-2)
#: (key heads, value heads, key dim, value dim): one part or tile and two, masked and whole.
GEOMETRIES = [(1, 2, 10, 6), (2, 4, 32, 16), (1, 2, 40, 72)]


def normal(rng, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=rng) * scale).to(dtype)


def mixer_case(rng, slots, lives, width, geometry, dtype=torch.float32, taps=4):
    """A call whose dead columns, and the state of whose other slots, are NaN."""
    key_heads, heads, key_dim, value_dim = geometry
    batch, channels = len(slots), 2 * key_heads * key_dim + heads * value_dim
    history = poison_(torch.empty(SLOTS, taps - 1, channels, dtype=dtype))
    state = poison_(torch.empty(SLOTS, heads, value_dim, key_dim))
    history[slots] = normal(rng, batch, taps - 1, channels, dtype=dtype)
    state[slots] = normal(rng, batch, heads, value_dim, key_dim)
    case = {
        "x": normal(rng, batch, width, channels, dtype=dtype),
        "taps_weight": normal(rng, channels, taps, dtype=dtype),
        "history": history,
        "ba": normal(rng, batch, width, 2 * heads, dtype=dtype, scale=2.0),
        "a_log": normal(rng, heads),
        "dt_bias": normal(rng, heads),
        "z": normal(rng, batch, width, heads * value_dim, dtype=dtype),
        "norm": normal(rng, value_dim, dtype=dtype),
        "state": state,
        "slots": torch.tensor(slots, dtype=torch.int32),
        "live": torch.tensor(lives, dtype=torch.int32),
    }
    attributes = {
        "key_heads": key_heads,
        "key_dim": key_dim,
        "value_heads": heads,
        "value_dim": value_dim,
        "eps": EPS,
    }
    return case, attributes


def commit_case(case, records, committed):
    """The commit of a block that the mixer has run, as of one layer."""
    lists = {"columns": case["x"], **{n: records[n] for n in RECORDS}}
    lists |= {"states": case["state"], "histories": case["history"]}
    rest = {"slots": case["slots"], "committed": torch.tensor(committed, dtype=torch.int32)}
    return {name: [value] for name, value in lists.items()} | rest


def requests(case, rows):
    """The call of some of its requests."""
    per_request = ("x", "ba", "z", "slots", "live")
    return {n: v[rows].contiguous() if n in per_request else v for n, v in case.items()}


def columns(case, start, stop):
    """The call of some of its columns."""
    cut = {n: case[n][:, start:stop].contiguous() for n in ("x", "ba", "z")}
    return {**case, **cut, "live": (case["live"] - start).clamp(0, stop - start)}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, F32_REDUCTION), (torch.bfloat16, BF16_CUTS)]
)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("slots", "lives", "width"), [([2], [1], 1), ([3, 0], [2, 5], 5)])
def test_mixer(rng, check, dtype, tolerance, geometry, slots, lives, width):
    case, attributes = mixer_case(rng, slots, lives, width, geometry, dtype)
    case["x"][0, 0, :3] = torch.tensor([0.0, 300.0, -300.0])
    if dtype == torch.bfloat16:
        case["norm"] *= 0.25  # with a gate of 3, cuts of y would be beyond a bound for its size
    found = check(MIXER, case, attributes, tolerance)
    for b, live in enumerate(lives):
        assert not found["out"][b, live:].any() and not found["u"][b, live:].any()


def test_log_decays_keep_their_last_bits(rng, run):
    """softplus from where it is exp(x) to where it is x."""
    width = 64
    case, attributes = mixer_case(rng, [1], [width], width, GEOMETRIES[0])
    case["ba"][0, :, 2:] = torch.linspace(-30.0, 30.0, 2 * width).view(width, 2)
    case["a_log"].zero_()
    case["dt_bias"].zero_()
    found = run(MIXER, case, attributes)["g"][0].double()
    expected = -torch.log1p(torch.exp(case["ba"][0, :, 2:].double()))
    assert float((found / expected - 1.0).abs().max()) < 4e-7


@pytest.mark.parametrize("taps", [1, 2])
def test_mixer_taps(rng, check, taps):
    case, attributes = mixer_case(rng, [1], [3], 3, GEOMETRIES[0], taps=taps)
    check(MIXER, case, attributes, F32_REDUCTION)


def test_mixer_row_invariant(rng, run):
    """The same bits alone and in company, in a block cut short, with other columns dead."""
    lives, width = [9, 4], 10
    case, attributes = mixer_case(rng, [3, 1], lives, width, GEOMETRIES[1])
    whole = run(MIXER, case, attributes)
    turned = run(MIXER, requests(case, [1, 0]), attributes)
    for name, value in whole.items():
        assert same_bytes(turned[name].flip(0), value), name
    for b in (0, 1):
        for stop in (1, 4, 9):
            cut = columns(requests(case, [b]), 0, stop)
            for name, value in run(MIXER, cut, attributes).items():
                assert same_bytes(value, whole[name][b : b + 1, :stop]), f"{name}, {stop} columns"
    for name in ("x", "ba"):
        poison_(case[name][0, 9:])
    dead = run(MIXER, case, attributes)
    assert same_bytes(dead["out"], whole["out"])
    assert same_bytes(dead["k"][:, :9], whole["k"][:, :9])
    assert same_bytes(dead["u"], whole["u"])


def test_commit_then_the_next_column(rng, run):
    """What a block's column N gives is what it gives alone, after N columns were committed."""
    case, attributes = mixer_case(rng, [2], [6], 6, GEOMETRIES[1])
    whole = run(MIXER, case, attributes)
    records = {name: whole[name] for name in RECORDS}
    steps = dict(case)
    for count in range(7):
        after = run(COMMIT, commit_case(case, records, [count]), {"layers": 1})
        after = {"state": after["states"][0], "history": after["histories"][0]}
        for name, value in after.items():
            assert same_bytes(value, steps[name]), f"{name}, {count} columns"
        if count == 6:
            break
        one = run(MIXER, {**columns(case, count, count + 1), **after}, attributes)
        for name, value in one.items():
            assert same_bytes(value, whole[name][:, count : count + 1]), f"{name}, column {count}"
        call = commit_case({**columns(case, count, count + 1), **after}, one, [1])
        stepped = run(COMMIT, call, {"layers": 1})
        steps = {"state": stepped["states"][0], "history": stepped["histories"][0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("taps", [1, 4])
def test_commit(rng, run, dtype, geometry, taps):
    """Three layers against the reference; what is not committed, or not this request's, stays."""
    slots, committed, layers = [3, 0, 1], [4, 0, 2], 3
    calls = []
    for _ in range(layers):
        case, attributes = mixer_case(rng, slots, [5] * 3, 5, geometry, dtype, taps)
        records = dict(zip(MIXER.outputs, MIXER.reference(**case, **attributes), strict=True))
        for b, count in enumerate(committed):
            for value in (case["x"], *(records[n] for n in RECORDS)):
                poison_(value[b, count:])
        calls.append(commit_case(case, records, committed))
    call = {
        name: [c[name][0] for c in calls] if isinstance(value, list) else value
        for name, value in calls[0].items()
    }
    before = [value.clone() for value in call["states"]]
    found = run(COMMIT, call, {"layers": layers})
    wide = {
        n: [t.double() for t in v] if isinstance(v, list) else v.clone() for n, v in call.items()
    }
    COMMIT.reference(**wide, layers=layers)
    exact = {n: [t.clone() for t in v] if isinstance(v, list) else v for n, v in call.items()}
    COMMIT.reference(**exact, layers=layers)
    for layer in range(layers):
        state, oracle = found["states"][layer], wide["states"][layer]
        assert_matches(state[[3, 1]], oracle[[3, 1]], F32_REDUCTION)
        assert same_bytes(state[[0, 2]], before[layer][[0, 2]])
        assert same_bytes(found["histories"][layer], exact["histories"][layer])


def test_refuses_other_tensors(rng, tmp_path, run):
    case, attributes = mixer_case(rng, [1], [2], 2, GEOMETRIES[0])
    whole = run(MIXER, case, attributes)
    call = commit_case(case, whole, [1])
    specs = {
        n: tuple(map(spec_of, v)) if isinstance(v, list) else spec_of(v) for n, v in call.items()
    }
    module = kernel_case("gdn_commit", specs, {"layers": 1}).module(tmp_path)
    launch = {**call, **module.prepare(**call), "num_warps": 4, "num_stages": 1}
    with pytest.raises(ShapeError, match=r"gdn_commit.k: expected 1 tensors, got 2"):
        module.launch(**{**launch, "k": call["k"] * 2})
    with pytest.raises(ShapeError, match=r"gdn_commit.u\[0\]: expected .* torch.float32"):
        module.launch(**{**launch, "u": [call["u"][0].half()]})
    shifted = torch.zeros(call["g"][0].numel() + 1)[1:].view_as(call["g"][0])
    with pytest.raises(ShapeError, match="aligned to 16 bytes"):
        module.prepare(**{**call, "g": [call["g"][0], shifted]})


@pytest.mark.parametrize("warps", [1, 8])
def test_refuses_warps_that_sum_in_another_order(rng, run, warps):
    case, attributes = mixer_case(rng, [1], [2], 2, GEOMETRIES[0])
    choice = Choice({"BLOCK_V": 16}, num_warps=warps, num_stages=1)
    with pytest.raises(ShapeError, match=f"gdn_mixer: expected 2 to 4 warps.* got {warps}"):
        run(MIXER, case, attributes, choice=choice)
