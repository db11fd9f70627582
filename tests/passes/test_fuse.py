"""fuse: small schedule in, expected steps out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_graph.graph import Backend, Graph, GraphBuilder, GraphKey, Value
from dflash_graph.passes.fuse import fuse
from dflash_graph.passes.schedule import Schedule, schedule


def key(backend: Backend) -> GraphKey:
    return GraphKey("forward", backend, 0, 1, 2, "float32")


def layer(g: GraphBuilder, index: int, x: Value, *, stage: bool) -> Value:
    """norm, product, sum; optionally an opaque change of state before the sum."""
    slots = g.input("slots", (1,))
    with g.region(f"layer.{index}"):
        with g.region("mixer"):
            weight = g.weight(f"{index}.norm", (f"target/{index}.norm",), (8,))
            n = g.call("rms_norm", "norm", x=x, weight=weight, eps=1e-6, offset=True)
            matrix = g.weight(f"{index}.matrix", (f"target/{index}.matrix",), (8, 8))
            y = g.call("linear", "product", x=n, weight=matrix, tiled=True)
        if stage:
            continuation = g.state(f"{index}.continuation", ("slots", 8))
            g.call(
                "stage_hidden",
                "stage",
                hidden=n,
                continuation=continuation,
                slots=slots,
                committed=slots,
            )
        return g.call("residual_add", "sum", x=x, y=y)


def graph(backend: Backend, *, stages: tuple[bool, ...] = (False, True)) -> Graph:
    g = GraphBuilder(key(backend))
    x = g.input("x", (1, 2, 8), "float32")
    with g.region("verify"):
        for index, stage in enumerate(stages):
            x = layer(g, index, x, stage=stage)
        g.retain(x)
    return g.build()


def outline(found: Schedule) -> list[tuple[str, list[str]]]:
    return [
        (step.kind, [node.name.removeprefix("verify/") for node in step.nodes])
        for step in found.steps
    ]


def test_neighbours_of_one_region_become_one_step() -> None:
    found = fuse(schedule(graph("inductor")))
    assert outline(found) == [
        ("traced", ["layer.0/mixer/norm", "layer.0/mixer/product", "layer.0/sum"]),
        ("traced", ["layer.1/mixer/norm", "layer.1/mixer/product"]),
        ("op", ["layer.1/stage"]),
        ("traced", ["layer.1/sum"]),
    ]
    assert found.steps[0].name == "verify/layer.0/mixer/norm .. verify/layer.0/sum"
    assert found.steps[0].region == "verify/layer.0"


def test_only_what_others_read_or_keep_is_stored() -> None:
    found = fuse(schedule(graph("inductor")))
    assert [found.escapes(index) for index in range(4)] == [
        ("verify/layer.0/sum",),
        ("verify/layer.1/mixer/norm", "verify/layer.1/mixer/product"),
        (),
        ("verify/layer.1/sum",),
    ]
    assert found.inputs(0) == ("x", "0.norm", "0.matrix")
    assert found.inputs(3) == ("verify/layer.0/sum", "verify/layer.1/mixer/product")
    assert "verify/layer.0/mixer/norm" not in dict((name, i) for i, name in found.stored())


def test_a_retained_value_inside_a_traced_step_is_stored() -> None:
    g = GraphBuilder(key("inductor"))
    x = g.input("x", (1, 2, 8), "float32")
    with g.region("verify"):
        kept = g.call("residual_add", "kept", x=x, y=x)
        unread = g.call("residual_add", "inner", x=kept, y=x)
        g.output(g.call("residual_add", "result", x=unread, y=x))
    g.retain(kept)
    found = fuse(schedule(g.build()))
    assert len(found.steps) == 1
    assert found.escapes(0) == ("verify/kept", "verify/result")


def test_alike_layers_give_alike_steps() -> None:
    found = fuse(schedule(graph("inductor", stages=(True, True))))
    first, second = found.steps[:3], found.steps[3:]
    assert [[node.op for node in step.nodes] for step in first] == [
        [node.op for node in step.nodes] for step in second
    ]


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_other_backends_keep_their_schedule(backend: Backend) -> None:
    single = schedule(graph(backend))
    assert fuse(single) is single


@given(st.lists(st.booleans(), min_size=1, max_size=5).map(tuple))
def test_fusing_reorders_and_loses_nothing(stages: tuple[bool, ...]) -> None:
    single = schedule(graph("inductor", stages=stages))
    found = fuse(single)
    assert [node for step in found.steps for node in step.nodes] == [
        step.nodes[0] for step in single.steps
    ]
    for step in found.steps:
        opaque = [node.contract.opaque for node in step.nodes]
        assert opaque == [True] if step.kind == "op" else not any(opaque)
        assert len({"/".join(node.region.split("/")[:2]) for node in step.nodes}) == 1
    for before, after in pairwise(found.steps):
        mergeable = before.kind == after.kind == "traced" and before.region == after.region
        assert not mergeable, "runs are maximal"


@given(st.lists(st.booleans(), min_size=1, max_size=5).map(tuple))
def test_what_a_step_takes_was_stored_before(stages: tuple[bool, ...]) -> None:
    found = fuse(schedule(graph("inductor", stages=stages)))
    known = {value.name for value in found.graph.by_role("input", "weight", "state")}
    for index in range(len(found.steps)):
        assert set(found.inputs(index)) <= known
        known |= set(found.escapes(index))
