"""NVTX ranges of a segment: they follow the regions, and nothing pays for them unless asked."""

from __future__ import annotations

import pytest
import torch

import dflash_graph as dg
from dflash_graph.errors import OptionError
from dflash_graph.lowering.segment import RANGES_VARIABLE, Segment, ranges_asked


class Recorder:
    """Opens and closes ranges; keeps what was open at each push."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[tuple[str, ...]] = []

    def push(self, name: str) -> None:
        self.open.append(name)
        self.paths.append(tuple(self.open))

    def pop(self) -> None:
        self.open.pop()


@pytest.fixture(scope="module", params=["eager", "inductor"])
def segment(request: pytest.FixtureRequest) -> Segment:
    options = dg.EngineOptions(
        device="cpu", lowering=request.param, max_batch=1, max_context=64, draft_tokens=3
    )
    with dg.Engine.demo(options) as engine:
        engine.generate([[5, 6, 7]], dg.SamplingParams(max_new_tokens=4))
        return engine.rounds[1].segments[0]


def test_ranges_nest_by_segment_region_and_step(segment: Segment) -> None:
    recorder = Recorder()
    segment.run_in_ranges(recorder.push, recorder.pop)
    assert recorder.open == []
    assert recorder.paths[0] == ("forward",)
    steps = [launch.step for launch in segment.launches]
    names = [path for path in recorder.paths if path[-1] in {step.name for step in steps}]
    assert [path[-1] for path in names] == [step.name for step in steps]
    for path, step in zip(names, steps, strict=True):
        region = "/".join(path[1:-1])
        assert all(f"{node.region}/".startswith(f"{region}/") for node in step.nodes), path
    regions = [path for path in recorder.paths if path[-1] not in {step.name for step in steps}]
    layer = [path for path in regions if path == ("forward", "verify", "layer.0")]
    assert len(layer) == 1, "a region is opened once, not for each of its steps"


def test_ranges_change_no_result_and_a_probe_sees_each_step(segment: Segment) -> None:
    def stored() -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        recorder = Recorder()

        def probe(step: object, values: object) -> None:
            assert isinstance(values, dict)
            assert recorder.open, "a step's values are seen inside its ranges"
            seen.extend(value.clone() for value in values.values())

        segment.run_in_ranges(recorder.push, recorder.pop, probe)
        return seen

    plain: list[torch.Tensor] = []
    segment.run(lambda _, values: plain.extend(value.clone() for value in values.values()))
    found = stored()
    assert len(found) == len(plain) > len(segment.launches)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_ranges_are_closed_when_a_step_fails(segment: Segment) -> None:
    recorder = Recorder()

    def fail(step: object, values: object) -> None:
        if len(recorder.paths) > 10:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        segment.run_in_ranges(recorder.push, recorder.pop, fail)
    assert recorder.open == []


def test_a_cpu_segment_opens_no_ranges(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a range on the CPU")

    monkeypatch.setenv(RANGES_VARIABLE, "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", refuse)
    assert ranges_asked()
    Segment(segment.schedule, segment.launches).run()


@pytest.mark.parametrize(("value", "asked"), [("", False), ("0", False), ("1", True)])
def test_the_variable_is_0_or_1(value: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANGES_VARIABLE, value)
    assert ranges_asked() is asked


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANGES_VARIABLE, "yes")
    with pytest.raises(OptionError, match="DFLASH_GRAPH_NVTX: expected 0 or 1, got 'yes'"):
        ranges_asked()


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_ranges_on_a_device_follow_uncaptured_runs(
    cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setenv(RANGES_VARIABLE, "1")
    options = dg.EngineOptions(
        device="cuda", max_batch=1, max_context=256, draft_tokens=3, cuda_graphs=cuda_graphs
    )
    with dg.Engine.demo(options) as engine:
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", recorder.push)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", recorder.pop)
        executor = engine.rounds[1]
        executor.run(0)
        torch.cuda.synchronize()
    assert recorder.open == []
    assert any("verify" in path for path in recorder.paths) is not cuda_graphs
