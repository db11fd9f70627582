"""Live buffers do not overlap, no live value is overwritten, the peak is near its bound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_graph.errors import PlanError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.graph import Backend, Graph, GraphBuilder, GraphKey, Value
from dflash_graph.lowering.schedules import lowered
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_prefill, declare_round
from dflash_graph.passes.fuse import fuse
from dflash_graph.passes.schedule import Schedule, schedule
from dflash_graph.planner import ALIGNMENT, Plan, Request, lower_bound, place, plan
from dflash_graph.profiles import load_preset
from dflash_graph.report import plan_dict, plan_text, retained_bytes

BACKENDS: tuple[Backend, ...] = ("eager", "inductor")

#: The largest peak over lower bound that a round or chunk may take.
MAX_RATIO = 1.10

requests = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 20), st.integers(0, 10)), max_size=30
).map(
    lambda rows: [
        Request(f"r{index}", nbytes, first, first + length)
        for index, (nbytes, first, length) in enumerate(rows)
    ]
)


@given(requests)
def test_live_buffers_never_overlap(found: list[Request]) -> None:
    offsets = place(found)
    assert offsets.keys() == {request.name for request in found}
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets.values())
    for index, a in enumerate(found):
        for b in found[:index]:
            if a.first <= b.last and b.first <= a.last:
                start_a, start_b = offsets[a.name], offsets[b.name]
                assert start_a + a.nbytes <= start_b or start_b + b.nbytes <= start_a, (a, b)


@given(requests)
def test_the_peak_is_at_least_the_bound(found: list[Request]) -> None:
    offsets = place(found)
    peak = max((offsets[request.name] + request.nbytes for request in found), default=0)
    assert -(-peak // ALIGNMENT) * ALIGNMENT >= lower_bound(found)
    live = [
        sum(-(-r.nbytes // ALIGNMENT) * ALIGNMENT for r in found if r.first <= step <= r.last)
        for step in range(40)
    ]
    assert lower_bound(found) == max(live)


@given(requests, st.randoms(use_true_random=False))
def test_placement_depends_on_no_order(found: list[Request], random: Any) -> None:
    shuffled = random.sample(found, len(found))
    assert place(found) == place(shuffled)


#: A step of a random segment: op, which two earlier values it reads, the width of a product.
Recipe = list[tuple[str, int, int, int]]

recipes = st.lists(
    st.tuples(
        st.sampled_from(["norm", "norm", "sum", "sum", "product", "stage"]),
        st.integers(0, 5),  # how far back the first operand lies: near ones make in-place chains
        st.integers(0, 99),
        st.sampled_from([8, 70, 300]),
    ),
    min_size=1,
    max_size=25,
)
picks = st.sets(st.integers(0, 99), max_size=6)


def declare(g: GraphBuilder, region: str, recipe: Recipe, made: list[Value]) -> list[Value]:
    """Declare a random segment; returns the values it computes."""
    own: list[Value] = []
    slots = g.input("slots", (1,))
    with g.region(region):
        for index, (op, back, other, width) in enumerate(recipe):
            x = made[-1 - back % len(made)]
            inner = x.spec.bind({})[-1]
            alike = [value for value in made if value.spec == x.spec]
            with g.region(f"layer.{index // 4}"):
                if op == "norm":
                    weight = g.weight(f"norm.{inner}", (f"target/norm.{inner}",), (inner,))
                    y = g.call("rms_norm", x=x, weight=weight, eps=1e-6, offset=True)
                elif op == "sum":
                    y = g.call("residual_add", x=x, y=alike[other % len(alike)])
                elif op == "product":
                    name = f"product.{inner}.{width}"
                    weight = g.weight(name, (f"target/{name}",), (width, inner))
                    y = g.call("linear", x=x, weight=weight, tiled=True)
                else:
                    state = g.state(f"continuation.{inner}", ("slots", inner))
                    g.call(
                        "stage_hidden", hidden=x, continuation=state, slots=slots, committed=slots
                    )
                    continue
            made.append(y)
            own.append(y)
    return own


def random_round(
    backend: Backend, forward: Recipe, finish: Recipe, retained: set[int], outputs: set[int]
) -> list[Graph]:
    """Two segments; the second reads what the first retained."""
    g = GraphBuilder(GraphKey("forward", backend, 0, 1, 2, "float32"))
    own = declare(g, "verify", forward, [g.input("x", (1, 2, 8), "float32")])
    kept = [own[index] for index in sorted({pick % len(own) for pick in retained})] if own else []
    for value in kept:
        g.retain(value)
    for value in [own[i] for i in sorted({pick % len(own) for pick in outputs})] if own else []:
        if value not in kept:
            g.output(value)
    h = GraphBuilder(GraphKey("finish", backend, 0, 1, 2, "float32"))
    start = [h.input("x", (1, 2, 8), "float32"), *(h.retained(value) for value in kept)]
    declare(h, "commit", finish, start)
    return [g.build(), h.build()]


class Shadow:
    """An arena whose every byte knows which value wrote it last."""

    def __init__(self, found: Plan) -> None:
        self.offsets = found.offsets()
        self.owners = np.full(found.arena_bytes, -1)
        self.ids = {name: index for index, name in enumerate(self.offsets)}

    def write(self, value: Value) -> None:
        start, count = self.offsets[value.name], value.spec.nbytes()
        self.owners[start : start + count] = self.ids[value.name]

    def read(self, value: Value, where: str) -> None:
        start, count = self.offsets[value.name], value.spec.nbytes()
        is_own = self.owners[start : start + count] == self.ids[value.name]
        assert is_own.all(), f"{where}: {value.name} was overwritten"


def simulate(schedules: list[Schedule], found: Plan) -> None:
    """Run the steps on shadow memory: every read sees exactly what its value's producer wrote."""
    shadow = Shadow(found)
    for found_schedule in schedules:
        values = found_schedule.graph.values
        for index, step in enumerate(found_schedule.steps):
            for name in found_schedule.inputs(index):
                if name in shadow.offsets:
                    shadow.read(values[name], step.name)
            for name in found_schedule.escapes(index):
                if values[name].role != "output":
                    shadow.write(values[name])
            for name in found_schedule.escapes(index):
                if values[name].role != "output":
                    shadow.read(values[name], f"results of {step.name}")
        for value in found_schedule.graph.by_role("retained"):
            if found_schedule.graph.producer(value.name):
                shadow.read(value, "end of the segment")


@pytest.mark.parametrize("backend", BACKENDS)
@given(recipes, recipes, picks, picks)
def test_no_live_value_is_overwritten(
    backend: Backend, forward: Recipe, finish: Recipe, retained: set[int], outputs: set[int]
) -> None:
    graphs = random_round(backend, forward, finish, retained, outputs)
    schedules = [fuse(schedule(graph)) for graph in graphs]
    found = plan(schedules)
    assert found.arena_bytes >= found.lower_bound
    assert all(buffer.offset % ALIGNMENT == 0 for buffer in found.buffers)
    simulate(schedules, found)


def test_a_chain_of_in_place_results_takes_one_buffer() -> None:
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 70), "float32")
    weight = g.weight("w", ("target/w",), (70,))
    for _ in range(3):
        x = g.call("rms_norm", "norm", x=x, weight=weight, eps=1e-6, offset=True)
    g.retain(x)
    found = plan([schedule(g.build())])
    (buffer,) = found.buffers
    assert buffer.values == ("norm", "norm.2", "norm.3")
    assert (buffer.nbytes, found.arena_bytes, found.lower_bound) == (560, 768, 768)


def test_an_input_that_is_read_again_keeps_its_buffer() -> None:
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 8), "float32")
    first = g.call("residual_add", "first", x=x, y=x)
    twice = g.call("residual_add", "twice", x=first, y=first)
    later = g.call("residual_add", "later", x=twice, y=first)
    g.retain(later)
    found = plan([schedule(g.build())])
    assert [buffer.values for buffer in found.buffers] == [("first",), ("twice", "later")]


def test_an_input_that_is_read_twice_in_its_last_step_keeps_its_buffer() -> None:
    """Written row by row, the result would meet rows of the other argument."""
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 8), "float32")
    first = g.call("residual_add", "first", x=x, y=x)
    g.retain(g.call("residual_add", "twice", x=first, y=first))
    found = plan([schedule(g.build())])
    assert sorted(buffer.values for buffer in found.buffers) == [("first",), ("twice",)]


def test_a_retained_value_gives_its_buffer_to_nobody() -> None:
    """Also not to the very last step of its segment, where its life would seem to end."""
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 8), "float32")
    kept = g.call("residual_add", "kept", x=x, y=x)
    last = g.call("residual_add", "last", x=kept, y=x)
    g.retain(kept)
    g.retain(last)
    h = GraphBuilder(GraphKey("finish", "eager", 0, 1, 2, "float32"))
    slots = h.input("slots", (1,))
    for name, value in (("a", last), ("b", kept)):
        h.call(
            "stage_hidden",
            hidden=h.retained(value),
            continuation=h.state(name, ("slots", 8)),
            slots=slots,
            committed=slots,
        )
    schedules = [schedule(g.build()), schedule(h.build())]
    found = plan(schedules)
    assert len(found.buffers) == 2
    simulate(schedules, found)


def test_results_in_the_frame_need_no_arena() -> None:
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 8), "float32")
    g.output(g.call("residual_add", x=x, y=x))
    found = plan([schedule(g.build())])
    assert found.buffers == () and found.arena_bytes == found.lower_bound == 0
    assert found.ratio == 1.0


def test_two_segments_store_no_value_of_one_name() -> None:
    g = GraphBuilder(GraphKey("forward", "eager", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 8), "float32")
    g.retain(g.call("residual_add", x=x, y=x))
    graph = g.build()
    with pytest.raises(PlanError, match="residual_add: two segments store a value of this name"):
        plan([schedule(graph), schedule(graph)])


def test_two_segments_have_no_workspace_of_one_name() -> None:
    schedules = []
    for segment in ("forward", "finish"):
        g = GraphBuilder(GraphKey(segment, "triton", 0, 1, 2, "float32"))
        slots = g.input("slots", (1,))
        hidden = g.input("hidden", (1, 2, 8), "float32")
        state = g.state("state", ("slots", 8))
        where = {"continuation": state, "slots": slots, "committed": slots}
        g.call("stage_hidden", "stage", hidden=hidden, **where)
        schedules.append(replace(schedule(g.build()), workspace=(4096,)))
    with pytest.raises(PlanError, match=r"stage .*two segments have a node of this name"):
        plan(schedules)
    assert plan([replace(schedules[0], workspace=(0,)), schedules[1]]).arena_bytes == 4096


def test_workspace_lives_in_its_step_only() -> None:
    """It is apart from all that its step reads and writes, and the next step takes its bytes."""
    g = GraphBuilder(GraphKey("forward", "triton", 0, 1, 2, "float32"))
    x = g.input("x", (1, 2, 64), "float32")
    for name in ("first", "second", "third"):
        weight = g.weight(f"{name}.weight", (f"target/{name}",), (64, 64))
        x = g.call("linear", name, x=x, weight=weight, tiled=True)
    g.retain(x)
    bare = schedule(g.build())
    found = plan([replace(bare, workspace=(5000, 0, 7000))])
    buffers = {buffer.values[0]: buffer for buffer in found.buffers}
    assert buffers.keys() == {
        "first",
        "second",
        "third",
        "first (workspace)",
        "third (workspace)",
    }
    for index, name, nbytes in ((0, "first", 5000), (2, "third", 7000)):
        buffer = buffers[f"{name} (workspace)"]
        assert (buffer.first, buffer.last, buffer.nbytes) == (index, index, nbytes)
        for value in ("first",) if index == 0 else ("second", "third"):
            other = buffers[value]
            assert buffer.end <= other.offset or other.end <= buffer.offset, (name, value)
    reused = buffers["first (workspace)"], buffers["third (workspace)"]
    assert reused[0].offset < reused[1].end and reused[1].offset < reused[0].end
    assert found.arena_bytes == found.lower_bound
    assert found.arena_bytes < plan([bare]).arena_bytes + 5000 + 7000


def test_workspace_of_a_later_segment_leaves_what_is_kept() -> None:
    forward: Recipe = [("product", 0, 0, 300), ("sum", 0, 0, 8)]
    graphs = random_round("eager", forward, [("norm", 0, 0, 8)], {0, 1}, set())
    schedules = [schedule(graph) for graph in graphs]
    schedules[1] = replace(schedules[1], workspace=(4096,) * len(schedules[1].steps))
    found = plan(schedules)
    start = found.boundaries[1]
    works = [b for b in found.buffers if b.values[0].endswith("(workspace)")]
    assert [(b.first, b.last) for b in works] == [
        (start + index, start + index) for index in range(len(works))
    ]
    simulate(schedules, found)


@pytest.mark.parametrize("draft_tokens", [0, 1, 7, 15])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_27b_peak_of_kernels_is_near_its_bound(kind: str, draft_tokens: int) -> None:
    """With the workspace of every kernel."""
    for name, segments in large_segments(kind, "triton", draft_tokens):
        schedules = [lowered(graph) for graph in segments]
        assert any(schedules[0].workspace)
        found = plan(schedules)
        assert 1.0 <= found.ratio <= MAX_RATIO, f"{name}: {found.ratio:.4f}"


def small_plan() -> Plan:
    forward: Recipe = [("product", 0, 0, 300), ("product", 1, 0, 70), ("sum", 0, 0, 8)]
    graphs = random_round("eager", forward, [("norm", 0, 0, 8)], {0, 1, 2}, set())
    return plan([schedule(graph) for graph in graphs])


def broken(found: Plan, index: int, offset: int) -> Plan:
    buffers = list(found.buffers)
    buffers[index] = replace(buffers[index], offset=offset)
    return replace(found, buffers=tuple(buffers))


def test_check_finds_a_broken_plan() -> None:
    found = small_plan()
    assert found.check() is found
    assert len(found.buffers) >= 3
    moved = next(i for i, buffer in enumerate(found.buffers) if buffer.offset)
    with pytest.raises(PlanError, match=r"both live at step \d+ \(.+\) and share bytes"):
        broken(found, moved, offset=0).check()
    with pytest.raises(PlanError, match="outside the arena"):
        broken(found, 0, offset=1).check()
    with pytest.raises(PlanError, match="outside the arena"):
        broken(found, 0, offset=found.arena_bytes).check()
    with pytest.raises(PlanError, match="outside the arena"):
        broken(found, 0, offset=-ALIGNMENT).check()


def test_the_report_says_what_is_planned() -> None:
    found = small_plan()
    facts = plan_dict(found)
    assert facts["arena_bytes"] == found.arena_bytes
    assert [buffer["offset"] for buffer in facts["buffers"]] == [b.offset for b in found.buffers]
    assert facts["retained_bytes"] == retained_bytes(found) > 0
    text = plan_text(found)
    assert f"ratio {found.ratio:.4f}" in text
    for buffer in found.buffers:
        assert buffer.values[0] in text and found.steps[buffer.last] in text


def large_pair(kind: str) -> ModelPair:
    """The 27B target with its DFlash2 draft, or a DFlash one whose sixth layer is full."""
    preset = load_preset("qwen3.5-27b-dflash2")
    draft = preset["draft"]
    if kind == "dflash":
        own = {
            key: value
            for key, value in draft["dflash_config"].items()
            if not key.startswith(("conv_", "selector_"))
        }
        draft = draft | {
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "dflash_config": own,
        }
    return ModelPair(
        target_geometry_from_config(preset["target"], "27B"),
        draft_geometry_from_config(draft, kind),
        "bfloat16",
    )


def large_segments(
    kind: str, backend: Backend, draft_tokens: int
) -> Iterator[tuple[str, tuple[Graph, ...]]]:
    pair = large_pair(kind)
    for batch in range(1, 9):
        declared = declare_round(pair, backend, draft_tokens=draft_tokens, batch=batch)
        yield f"B={batch}", declared.segments


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft_tokens", [0, 1, 7, 15])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_27b_peak_is_near_its_bound(kind: str, draft_tokens: int, backend: Backend) -> None:
    for name, segments in large_segments(kind, backend, draft_tokens):
        found = plan([fuse(schedule(graph)) for graph in segments])
        assert 1.0 <= found.ratio <= MAX_RATIO, f"{name}: {found.ratio:.4f}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [256, 1024])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_27b_prefill_peak_is_near_its_bound(kind: str, tokens: int, backend: Backend) -> None:
    graph = declare_prefill(large_pair(kind), backend, tokens=tokens)
    found = plan([fuse(schedule(graph))])
    assert 1.0 <= found.ratio <= MAX_RATIO


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_27b_runs_on_shadow_memory(backend: Backend) -> None:
    """At the smallest width: the order of reads and writes is the same at every other."""
    declared = declare_round(large_pair("dflash2"), backend, draft_tokens=1, batch=1)
    schedules = [fuse(schedule(graph)) for graph in declared.segments]
    simulate(schedules, plan(schedules))
