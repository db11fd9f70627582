"""Profiles of declared graphs and of start-ups: what they say is what is built."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
import torch

import dflash_graph as dg
from dflash_graph import demo, report
from dflash_graph.bench.nodes import measured_ceiling, time_rounds
from dflash_graph.choices import Choice, Choices, Entry
from dflash_graph.cli.selection import Dtype, select_pair
from dflash_graph.errors import OptionError
from dflash_graph.kernels import node_case
from dflash_graph.passes.combine import combine
from dflash_graph.profile.build import declared_profile, started_profile
from dflash_graph.profile.document import Profile
from dflash_graph.profile.floors import bound_of, floor_us
from dflash_graph.profile.memory import distinct_bytes
from dflash_graph.profile.parts import Ceiling, ExecutorProfile
from dflash_graph.rounds import Rounds
from dflash_graph.state import Capacities

CONTEXT = 100


def pair_of(preset: str = "demo-dflash2", draft_tokens: int | None = None) -> dg.ModelPair:
    return select_pair(preset, None, None, draft_tokens, Dtype.bfloat16)[0]


def options_of(lowering: str, **changes: object) -> dg.EngineOptions:
    numbers = {"max_batch": 2, "max_context": 256, "prefill_chunk": 64} | changes
    return dg.EngineOptions.model_validate(
        {"device": "cpu", "lowering": lowering, "dtype": "float32", **numbers}
    )


def started(lowering: str, **changes: object) -> Rounds:
    options = options_of(lowering, **changes)
    model = dg.Model.load(demo.target_directory(), demo.draft_directory("dflash2"), options)
    return dg.compile_rounds(model, options)


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    torch.set_num_threads(1)
    return started("eager")


@pytest.fixture(scope="module")
def measured(rounds: Rounds) -> Profile:
    times = time_rounds(rounds, batches=[1, 2], context=CONTEXT, turns=4)
    return started_profile(
        rounds, name="demo", context=CONTEXT, ceiling=measured_ceiling("cpu"), times=times
    )


def test_nodes_are_those_of_the_graphs(demo_profile: Profile) -> None:
    pair = pair_of()
    for batch in (1, 2):
        declared = dg.declare_round(pair, "eager", draft_tokens=7, batch=batch)
        executor = demo_profile.executor(f"round B={batch}")
        for graph, segment in zip(declared.segments, executor.segments, strict=True):
            graph = combine(graph)
            costs = graph.cost(context=1024)
            assert segment.graph_hash == graph.content_hash
            assert {node.name for node in segment.nodes} == set(costs)
            for node in segment.nodes:
                cost = costs[node.name]
                own = (node.read_bytes, node.write_bytes, node.flops)
                assert own == (cost.read_bytes, cost.write_bytes, cost.flops)
                for value in node.outputs:
                    assert (
                        value.nbytes
                        == prod(size for size in value.shape if isinstance(size, int))
                        * {"bfloat16": 2, "float32": 4, "int32": 4}[value.dtype]
                    )


def check_order(executor: ExecutorProfile) -> None:
    """Inputs come first, steps ascend and have the plan's names."""
    for segment, start in zip(executor.segments, executor.plan.boundaries, strict=True):
        assert segment.first_step == start
        seen: set[str] = set()
        last = start
        for node in segment.nodes:
            assert set(node.inputs) <= seen
            assert last <= node.step
            assert node.name in executor.plan.steps[node.step] or node.traced
            seen.add(node.name)
            last = node.step


@pytest.mark.parametrize("backend", ["eager", "inductor", "triton"])
def test_nodes_stand_in_running_order(backend: str) -> None:
    profile = declared_profile(
        pair_of(), backend, name="demo", draft_tokens=3, max_batch=1, max_context=512
    )  # type: ignore[arg-type]
    for executor in profile.executors:
        check_order(executor)


def test_implementations() -> None:
    found = {}
    for backend in ("eager", "inductor", "triton"):
        profile = declared_profile(
            pair_of(), backend, name="demo", draft_tokens=3, max_batch=1, max_context=512
        )  # type: ignore[arg-type]
        nodes = list(profile.executor("round B=1").nodes())
        found[backend] = {(node.implementation, node.traced) for node in nodes}
        assert all((node.config is not None) == (backend == "triton") for node in nodes)
        prefill = next(e for e in profile.executors if e.name.startswith("prefill"))
        assert {node.implementation for node in prefill.nodes()} == {"eager"}
    assert found == {
        "eager": {("eager", False)},
        "inductor": {("inductor", True), ("eager", False)},
        "triton": {("triton", False)},
    }


def test_configs_and_their_sources_are_those_that_run(large_profile: Profile) -> None:
    from dflash_graph.choices import shipped_choices

    (choices,) = [one for one in shipped_choices() if one.device == "NVIDIA H200"]
    pair = pair_of("qwen3.5-27b-dflash2")
    graph = combine(dg.declare_round(pair, "triton", draft_tokens=7, batch=1).forward)
    nodes = {node.name: node for node in graph.nodes}
    sources = set()
    for node in large_profile.executor("round B=1").segments[0].nodes:
        case = node_case(graph, nodes[node.name], choices)
        assert case is not None and node.config is not None
        assert node.config.holes == dict(case.holes)
        config = (node.config.template, node.config.num_warps, node.config.num_stages)
        assert config == (case.template, case.num_warps, case.num_stages)
        default = node_case(graph, nodes[node.name], Choices(choices.device, 90, pdl=choices.pdl))
        if node.source == "default":
            assert case == default
        sources.add(node.source)
    assert sources == {"default", choices.source}


def test_the_source_is_the_file_of_the_entry() -> None:
    """Layers of a lookup are one `Choices`; each entry still knows its file."""
    plain = declared_profile(
        pair_of(), "triton", name="demo", draft_tokens=3, max_batch=1, max_context=512
    )
    node = next(n for n in plain.executor("round B=1").nodes() if n.op == "rms_norm")
    assert node.config is not None
    tiles = {"BLOCK_H": 2048}
    assert Choice(tiles).num_warps == 4
    assert {name for name in node.config.holes if name.startswith("BLOCK")} == set(tiles)
    entry = Entry("rms_norm", "bfloat16", {}, tiles, 8, {16: 1}, source="mine.json")
    tuned = declared_profile(
        pair_of(),
        "triton",
        name="demo",
        draft_tokens=3,
        max_batch=1,
        max_context=512,
        choices=Choices("NVIDIA H200", 90, (entry,), source="mine.json, nvidia-h200.json"),
    )
    by_source = {(n.op == "rms_norm", n.source) for n in tuned.executor("round B=1").nodes()}
    assert by_source == {(True, "mine.json"), (False, "default")}
    found = next(n for n in tuned.executor("round B=1").nodes() if n.op == "rms_norm")
    assert found.config is not None and found.config.num_warps == 8


def test_weights_of_nodes_cover_the_checkpoint(demo_profile: Profile) -> None:
    """Every weight that a round reads whole is some node's; gathered tables are nobody's."""
    executor = demo_profile.executor("round B=1")
    read = {weight for node in executor.nodes() for weight in node.weights}
    pair = pair_of()
    graph = dg.declare_round(pair, "eager", draft_tokens=7, batch=1).forward
    declared = {
        part
        for value in graph.by_role("weight")
        if value.weight is not None
        for part in value.weight.parts
    }
    assert read <= declared
    # Both sides of a grouped convolution read a half of its base kernel.
    others = {name for name in declared - read if not name.endswith(".base_kernel")}
    assert not [name for name in others if "layers." in name]


def test_memory_is_that_of_the_plan(demo_profile: Profile) -> None:
    expected = report.plan_memory(
        pair_of(),
        "eager",
        draft_tokens=7,
        max_batch=2,
        prefill_chunk=1024,
        capacities=Capacities(2, 4096),
    )
    planned = {found.name: found.planned_bytes for found in demo_profile.memory}
    assert planned["arena"] == expected.arena_bytes
    assert planned["frames"] == expected.frame_bytes
    assert planned["weights.target"] == expected.weights["target"]
    state = sum(size or 0 for name, size in planned.items() if name.startswith("state."))
    assert state == expected.state.nbytes
    assert sum(size or 0 for size in planned.values()) == expected.total_bytes
    for executor in expected.executors:
        plan = demo_profile.executor(executor.name).plan
        assert plan.arena_bytes == executor.plan.arena_bytes
        assert len(plan.buffers) == len(executor.plan.buffers)


def test_equal_start_ups_give_equal_documents(demo_profile: Profile) -> None:
    again = declared_profile(
        pair_of(),
        "eager",
        name="demo-dflash2",
        draft_tokens=7,
        max_batch=2,
        max_context=4096,
        context=1024,
        ceiling=demo_profile.ceiling,
    )
    head = again.identity.model_copy(update={"created": demo_profile.identity.created})
    assert again.model_copy(update={"identity": head}) == demo_profile


@pytest.mark.parametrize(
    ("nbytes", "flops", "measured", "bound"),
    [
        (40_000_000, 10**6, None, "memory"),
        (40_000_000, 10**10, None, "compute"),
        (40_000_000, 10**6, 20.0, "memory"),
        (40_000_000, 10**6, 40.0, "latency"),
        (1000, 1000, None, "latency"),
        (4_000_000, 0, 1.5, "memory"),
    ],
)
def test_bounds(nbytes: int, flops: int, measured: float | None, bound: str) -> None:
    ceiling = Ceiling(read_tb_per_s=4.0, tflop_per_s=800)
    assert bound_of(nbytes, flops, ceiling, measured) == bound


def test_floors() -> None:
    ceiling = Ceiling(read_tb_per_s=4.0, tflop_per_s=800)
    assert floor_us(4_000_000, 0, ceiling) == pytest.approx(1.0)
    assert floor_us(4_000_000, 8 * 10**9, ceiling) == pytest.approx(10.0)
    assert floor_us(4_000_000, 8 * 10**9, Ceiling(read_tb_per_s=4.0)) == pytest.approx(1.0)


def test_bytes_that_several_tensors_share_count_once() -> None:
    whole = torch.zeros(10, 4)
    other = torch.zeros(3)
    parts = [whole[2:6], whole, other, whole[5:], other]
    assert distinct_bytes(parts) == whole.nbytes + other.nbytes
    assert distinct_bytes([]) == 0


# -- start-ups -------------------------------------------------------------------------------------


def test_times_reconcile(measured: Profile) -> None:
    for batch in (1, 2):
        executor = measured.executor(f"round B={batch}")
        assert executor.measured is not None and len(executor.measured.values) == 4
        assert all(node.measured is not None for node in executor.nodes())
        assert executor.unattributed_us is not None
        # A round cannot be shorter than its steps; medians of parts may differ by noise.
        assert -0.2 < executor.unattributed_us / executor.measured.median < 0.5
        for turn, whole in enumerate(executor.measured.values):
            parts = 0.0
            for segment in executor.segments:
                assert segment.measured is not None
                own = sum(n.measured.values[turn] for n in segment.nodes if n.measured)
                assert own < segment.measured.values[turn]
                parts += segment.measured.values[turn]
            assert parts <= whole
    assert measured.executor("sampling B=1").measured is None
    assert measured.ceiling.source == "measured"


def test_memory_of_a_start_up_is_as_planned(measured: Profile) -> None:
    by_name = {found.name: found for found in measured.memory}
    for name, found in by_name.items():
        if name in ("frames", "graphs"):
            continue
        assert found.actual_bytes == found.planned_bytes, name
    assert by_name["graphs"].actual_bytes == 0
    frames = by_name["frames"]
    assert 0 < (frames.actual_bytes or 0) < (frames.planned_bytes or 0), "no chunk was bound yet"
    assert [stage.name for stage in measured.startup] == ["weights", "graphs", "pools", "bind"]
    assert all(stage.seconds > 0 for stage in measured.startup)


@pytest.mark.slow
def test_a_traced_step_is_divided_by_floor() -> None:
    rounds = started("inductor", max_batch=1)
    times = time_rounds(rounds, batches=[1], context=CONTEXT, turns=2)
    profile = started_profile(rounds, name="demo", context=CONTEXT, times=times)
    executor = profile.executor("round B=1")
    steps: dict[tuple[str, int], list[float]] = {}
    floors: dict[tuple[str, int], list[float]] = {}
    shared = 0
    for segment in executor.segments:
        for node in segment.nodes:
            assert node.measured is not None
            steps.setdefault((segment.name, node.step), []).append(node.measured.values[0])
            floors.setdefault((segment.name, node.step), []).append(node.floor_us)
    for index, segment in enumerate(executor.segments):
        for at in range(len(rounds[1].segments[index].launches)):
            parts = steps[segment.name, segment.first_step + at]
            assert sum(parts) == pytest.approx(times["round B=1"].steps[index, at][0])
            own = floors[segment.name, segment.first_step + at]
            assert [part / sum(parts) for part in parts] == pytest.approx(
                [floor / sum(own) for floor in own]
            )
            shared += len(parts) > 1
    assert shared > 5
    check_order(executor)


def test_timing_leaves_no_runs_behind(rounds: Rounds, measured: Profile) -> None:
    assert {found.replays for found in measured.executors} == {0}
    assert all(found.captured is False for found in measured.executors)


@pytest.mark.parametrize("context", [0, 7, 249])
def test_contexts_without_room_are_refused(rounds: Rounds, context: int) -> None:
    with pytest.raises(OptionError, match=r"expected 8\.\.248 tokens"):
        time_rounds(rounds, batches=[1], context=context, turns=2)


@pytest.fixture(scope="module")
def engine() -> Iterator[dg.Engine]:
    torch.set_num_threads(1)
    with dg.Engine.demo(options_of("eager")) as found:
        found.generate([demo.prompts()[0]], dg.SamplingParams(max_new_tokens=20))
        yield found


def test_an_engine_says_what_ran(engine: dg.Engine) -> None:
    profile = engine.profile(name="mine", context=32)
    counts, statistics = profile.acceptance, engine.statistics
    assert profile.identity.name == "mine"
    assert counts is not None and counts.rounds == statistics.rounds > 0
    assert list(counts.accepted_by_position) == statistics.accepted_by_position
    runs = {found.name: found.replays for found in profile.executors}
    assert runs["round B=1"] == statistics.rounds
    assert runs["first token"] == 1 and runs["round B=2"] == 0
    assert any(name.startswith("prefill") and count for name, count in runs.items())
    assert dg.Profile.parse(profile.to_json()) == profile


def test_plain_decoding_has_a_profile_too() -> None:
    options = options_of("eager", max_batch=1)
    with dg.Engine.load(demo.target_directory(), None, options) as engine:
        profile = engine.profile()
    assert profile.identity.geometry["draft"] is None
    assert "catch-up" not in {found.name for found in profile.executors}
    assert profile.executor("round B=1").columns == 1
