"""Checks of candidates, in the interpreter here and on a device; times on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_graph.autotune import Candidate, Journal, Task, Tuner, find_tasks
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile_store import device_identity
from dflash_graph.profiles import load_preset


@pytest.mark.slow
@pytest.mark.parametrize("name", ["launching", "measurer"])
def test_in_the_interpreter(name: str, interpret: Callable[[Path], None]) -> None:
    interpret(Path(__file__).with_name(f"interpreted_{name}.py"))


def demo_tasks(preset: str = "demo-dflash2", ops: tuple[str, ...] = ()) -> tuple[Task, ...]:
    found = load_preset(preset)
    pair = ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype="bfloat16",
    )
    return find_tasks(pair, draft_tokens=7, max_batch=4, ops=ops)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["demo-dflash", "demo-dflash2"])
def test_what_runs_now_is_measured_on_a_device(preset: str) -> None:
    """Every tuned op: right, and a time for every row tile."""
    from dflash_graph.autotune.device import CudaMeasurer

    measurer = CudaMeasurer(context=256)
    for task in demo_tasks(preset):
        (outcome,) = measurer.measure(task, [task.incumbent(None)], turns=3)
        assert (outcome.status, outcome.message) == ("ok", ""), task.name
        assert outcome.samples.keys() == {call.label for call in task.calls}
        for samples in outcome.samples.values():
            assert len(samples) == 3 and all(0.1 < sample < 1e5 for sample in samples)


@pytest.mark.gpu
def test_a_large_product_takes_the_time_of_its_weight() -> None:
    """Weights rotate, so that none is read from L2: no faster than the memory of any device."""
    from dflash_graph.autotune.device import CudaMeasurer

    found = load_preset("qwen3.5-27b-dflash2")
    pair = ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype="bfloat16",
    )
    (task,) = (
        t
        for t in find_tasks(pair, draft_tokens=7, max_batch=1, ops=["linear_residual_norm"])
        if t.parts[0].key["I"] == 6144
    )
    (outcome,) = CudaMeasurer().measure(task, [task.incumbent(None)], turns=9)
    assert outcome.status == "ok", outcome.message
    (samples,) = outcome.samples.values()
    bytes_read = 2 * 5120 * 6144
    assert bytes_read / (sorted(samples)[4] * 1e-6) < 10e12


@pytest.mark.gpu
def test_what_does_not_launch_is_an_outcome() -> None:
    from dflash_graph.autotune.device import CudaMeasurer

    (task,) = (t for t in demo_tasks(ops=("linear_norm",)))
    held = task.incumbent(None)
    tiles = {**dict(held.tiles), "BLOCK_O": 128, "BLOCK_I": 512}
    stages = dict.fromkeys(dict(held.num_stages), 6)
    large = Candidate.make(tiles, 4, stages, False)
    bad, good = CudaMeasurer(context=64).measure(task, [large, held], turns=3)
    assert bad.status == "failed" and bad.message
    assert good.status == "ok"


@pytest.mark.gpu
def test_one_task_is_tuned_on_a_device(tmp_path: Path) -> None:
    from dflash_graph.autotune.device import CudaMeasurer

    (task,) = demo_tasks(ops=("rms_norm",))
    identity = device_identity()
    held = task.incumbent(None)
    tuner = Tuner(CudaMeasurer(context=64), Journal(tmp_path / "j"), identity)
    first = tuner.tune(task, held)
    assert first.result in ("won", "kept", "not resolved") and first.winner is not None
    again = Tuner(CudaMeasurer(context=64), Journal(tmp_path / "j"), identity)
    assert again.tune(task, held) == first and again.measured == 0


def test_a_measurer_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflash_graph.autotune.device import CudaMeasurer
    from dflash_graph.errors import OptionError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="expected a CUDA device, got none"):
        CudaMeasurer()
