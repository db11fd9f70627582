"""How captured rounds are divided among nodes: on the CPU by a clock, on a device by events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from types import SimpleNamespace

import pytest
import torch

import dflash_graph as dg
from dflash_graph import demo
from dflash_graph.bench import nodes as timing
from dflash_graph.bench.rounds import measure_round, round_frame
from dflash_graph.errors import OptionError
from dflash_graph.kernels import node_case
from dflash_graph.profile.build import started_profile
from dflash_graph.profile.document import Profile
from dflash_graph.profile.lint import lint
from dflash_graph.rounds import Rounds

CONTEXT = 100


def start(lowering: str, device: str = "cpu", **changes: object) -> Rounds:
    options = dg.EngineOptions.model_validate(
        {
            "device": device,
            "lowering": lowering,
            "dtype": "float32",
            "max_batch": 2,
            "max_context": 256,
            "prefill_chunk": 64,
            **changes,
        }
    )
    model = dg.Model.load(demo.target_directory(), demo.draft_directory("dflash2"), options)
    return dg.compile_rounds(model, options)


def test_launches_of_a_kernel_share_what_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    rounds = start("eager", max_batch=1)
    executor = rounds[1]
    taken: list[list[list[float]]] = []

    def drawn(bodies: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
        """Times of nothing: references, unlike kernels, do not bear what a round left behind."""
        taken.append([[numbers.random() for _ in range(turns)] for _ in bodies])
        return taken[-1]

    bodies: list[Callable[[], object]] = []

    def kept(body: Callable[[], object]) -> SimpleNamespace:
        bodies.append(body)
        return SimpleNamespace(replay=body)

    numbers = Random(1)
    monkeypatch.setattr(timing, "captured", kept)
    monkeypatch.setattr(timing, "interleaved", drawn)
    times = timing._replayed(executor, 3)
    segments, groups = taken
    assert [list(values) for values in times.segments] == segments
    assert len(bodies) == len(groups)
    assert times.rounds == tuple(sum(turn) for turn in zip(*segments, strict=True))
    assert set(times.steps) == {
        (index, at)
        for index, segment in enumerate(executor.segments)
        for at in range(len(segment.launches))
    }
    for turn in range(3):
        everything = sum(values[turn] for values in groups)
        assert sum(values[turn] for values in times.steps.values()) == pytest.approx(everything)
    # The feed-forward products of all layers are alike: they are timed together.
    graph = executor.compiled.graphs[0]
    alike: dict[object, set[float]] = {}
    for at, launch in enumerate(executor.segments[0].launches):
        (node,) = launch.step.nodes
        if node.op == "swiglu":
            case = node_case(graph, node)
            alike.setdefault(case, set()).add(times.steps[0, at][0])
    assert alike and all(len(found) == 1 for found in alike.values())
    assert len(groups) < len(times.steps) / 2


def test_ops_of_other_lowerings_have_no_times() -> None:
    rounds = start("eager", max_batch=1)
    with pytest.raises(OptionError, match="expected lowering 'triton'"):
        measure_round(rounds, 1, CONTEXT, ops=True)


def test_a_round_has_a_block_before_it_and_one_within() -> None:
    """Positions before the first would be written to other state."""
    rounds = start("eager", max_batch=1)
    room = rounds.capacities.context - rounds.columns
    for context in (-1, 0, rounds.columns - 1, room + 1):
        for call in (
            partial(round_frame, rounds, 1, context),
            partial(timing.time_rounds, rounds, batches=[1], context=context),
        ):
            with pytest.raises(OptionError, match=rf"{rounds.columns}\.\.{room} tokens"):
                call()
    for context in (rounds.columns, room):
        fields = round_frame(rounds, 1, context)
        assert min(fields["context_positions"][0][0]) == context - rounds.columns


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "launched"])
def test_rounds_of_kernels_on_a_device(captured: bool) -> None:
    rounds = start("triton", "cuda", cuda_graphs=captured)
    times = timing.time_rounds(rounds, batches=[1, 2], context=CONTEXT, turns=10)
    profile = started_profile(
        rounds,
        name="demo",
        context=CONTEXT,
        ceiling=timing.measured_ceiling("cuda"),
        times=times,
    )
    assert Profile.parse(profile.to_json()) == profile
    assert profile.identity.device.name == torch.cuda.get_device_name()
    assert profile.ceiling.read_tb_per_s > 0.1
    for batch in (1, 2):
        executor = profile.executor(f"round B={batch}")
        assert executor.captured is captured
        assert (executor.capture_seconds is not None) is captured
        assert all(node.measured is not None for node in executor.nodes())
        assert all(node.config is not None for node in executor.nodes())
        assert [segment.host_syncs for segment in executor.segments] == [0, 0]
        assert executor.measured is not None and executor.measured.median > 0
        assert executor.attributed_us is not None
    if captured:
        graphs = sum(found.graph_bytes or 0 for found in profile.executors)
        assert graphs <= rounds.graph_bytes + (1 << 20)
    rules = {found.rule for found in lint(profile) if found.severity == "error"}
    assert rules == (set() if captured else {"uncaptured"})


@pytest.mark.gpu
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_rounds_of_references_on_a_device(lowering: str) -> None:
    rounds = start(lowering, "cuda", max_batch=1)
    times = timing.time_rounds(rounds, batches=[1], context=CONTEXT, turns=3)
    profile = started_profile(rounds, name="demo", context=CONTEXT, times=times)
    executor = profile.executor("round B=1")
    assert executor.measured is not None and executor.unattributed_us is not None
    assert all(node.measured is not None for node in executor.nodes())
    for segment in executor.segments:
        assert segment.measured is not None and segment.host_syncs is not None
