"""The measurer of a device with the interpreter in its place; see `test_launching.py`.

What only a device has (graphs, events, memory) is replaced; arguments, copies, checks and launches
are its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash_graph.autotune import DeviceLost, Journal, Tuner, device, find_tasks
from dflash_graph.autotune.inputs import Inputs
from dflash_graph.errors import DeviceMemoryError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile_store import Identity
from dflash_graph.profiles import load_preset

torch.set_num_threads(1)
CACHE = 1 << 12
#: Before programmatic dependent launch, which the interpreter does not have.
IDENTITY = Identity("A Device 1", 80, {})


def task_of(op):
    found = load_preset("demo-dflash2")
    pair = ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype="float32",
    )
    return find_tasks(pair, draft_tokens=2, max_batch=2, ops=[op])[0]


@pytest.fixture
def machine(monkeypatch):
    """What the measurer asks of a device; `replays` has a body for each replay of a graph."""
    found = SimpleNamespace(replays=[], broken=False, compiled=[])

    def captured(body):
        body()
        return SimpleNamespace(replay=lambda: (found.replays.append(body), body()))

    def interleaved(bodies, turns):
        return [[8.0 * (index + 1)] * turns for index, _ in enumerate(bodies)]

    def synchronize():
        if found.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    properties = SimpleNamespace(
        shared_memory_per_block_optin=99 * 1024, multi_processor_count=4, L2_cache_size=CACHE
    )
    monkeypatch.setattr(device, "_LAUNCHES", 2)
    monkeypatch.setattr(device, "captured", captured)
    monkeypatch.setattr(device, "interleaved", interleaved)
    monkeypatch.setattr(device, "device_identity", lambda: IDENTITY)
    monkeypatch.setattr(device, "Inputs", lambda _, context: Inputs("cpu", context))
    monkeypatch.setattr(device, "precompile", lambda cases, sm, jobs: found.compiled.extend(cases))
    for name, value in {
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda index: properties,
        "mem_get_info": lambda: (1 << 34, 1 << 34),
        "memory_allocated": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def test_limits_are_the_devices(machine):
    limits = device.CudaMeasurer().limits
    assert (limits.shared, limits.processors, limits.has_pdl) == (99 * 1024, 4, False)


@pytest.mark.parametrize("op", ["linear_norm", "gdn_mixer"])
def test_a_right_candidate_is_timed_again_and_again(op, machine):
    """State that timing has changed is not what the next check begins with."""
    task = task_of(op)
    held = task.incumbent(None)
    measurer = device.CudaMeasurer(context=20)
    for _ in range(2):
        (outcome,) = measurer.measure(task, [held], turns=3)
        assert (outcome.status, outcome.message) == ("ok", "")
        assert outcome.samples.keys() == {call.label for call in task.calls}


def test_arguments_rotate_over_more_than_the_cache(machine):
    task, cache = task_of("linear_norm"), 1 << 20
    bench = device._Bench(task, 20, cache)
    (copies,) = bench._copies.values()
    weights = {arguments["weight"].data_ptr() for arguments in copies}
    each = 4 * 256 * 768
    assert len(weights) == len(copies) and len(copies) * each > 2 * cache
    assert (len(copies) - 2) * each < 2 * cache, "and no more than that takes"


def test_times_are_of_one_launch(machine, monkeypatch):
    monkeypatch.setattr(device, "_LAUNCHES", 5)
    task = task_of("rms_norm")
    (outcome,) = device.CudaMeasurer(context=20).measure(task, [task.incumbent(None)], turns=3)
    (samples,) = outcome.samples.values()
    assert samples == [8.0 / 5] * 3


def test_a_candidate_that_does_not_compile_is_an_outcome(machine):
    task = task_of("linear_norm")
    held = task.incumbent(None)
    tiles = {**dict(held.tiles), "BLOCK_O": 24}  # not one that the template takes
    bad = type(held).make(tiles, 4, dict(held.num_stages), False)
    measurer = device.CudaMeasurer(context=20)
    first, second = measurer.measure(task, [bad, held], turns=2)
    assert first.status == "failed" and first.message.startswith(
        "TemplateError: linear_norm.BLOCK_O"
    )
    assert second.status == "ok"


def test_a_device_that_is_lost_is_said(machine):
    task = task_of("linear_norm")
    held = task.incumbent(None)
    tiles = {**dict(held.tiles), "BLOCK_O": 24}
    bad = type(held).make(tiles, 4, dict(held.num_stages), False)
    machine.broken = True
    with pytest.raises(DeviceLost) as caught:
        device.CudaMeasurer(context=20).measure(task, [bad], turns=2)
    assert caught.value.candidate == bad


def test_a_task_that_does_not_fit_is_one_error(machine, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "Inputs", lambda *_: SimpleNamespace(make=full))
    with pytest.raises(DeviceMemoryError, match=r"linear_norm .*: expected room"):
        device.CudaMeasurer().measure(task_of("linear_norm"), [], turns=2)


def test_a_task_is_tuned_to_the_end(machine, tmp_path):
    task = task_of("rms_norm")
    held = task.incumbent(None)
    tuner = Tuner(device.CudaMeasurer(context=20), Journal(tmp_path / "j"), IDENTITY)
    decision = tuner.tune(task, held)
    assert decision.failed == 0 and decision.tried == 5
    assert {case.op for case in machine.compiled} == {"rms_norm"}
    again = Tuner(device.CudaMeasurer(context=20), Journal(tmp_path / "j"), IDENTITY)
    assert again.tune(task, held) == decision and again.measured == 0
