"""check: dead nodes, untouched values, and retained values that segments hand over."""

from __future__ import annotations

import pytest

from dflash_graph.errors import GraphError
from dflash_graph.graph import Graph, GraphBuilder, GraphKey, Value
from dflash_graph.passes.check import check, check_segments

FORWARD = GraphKey("forward", "eager", 0, 1, 2, "float32")
FINISH = GraphKey("finish", "eager", 0, 1, 2, "float32")


def start(key: GraphKey = FORWARD) -> tuple[GraphBuilder, Value]:
    g = GraphBuilder(key)
    return g, g.input("x", (1, 2, 8), "float32")


def forward(*, retain: bool = True) -> tuple[Graph, Value]:
    g, x = start()
    y = g.call("residual_add", x=x, y=x)
    return (g.build() if not retain else _retained(g, y)), y


def _retained(g: GraphBuilder, y: Value) -> Graph:
    g.retain(y)
    return g.build()


def finish(value: Value) -> Graph:
    g = GraphBuilder(FINISH)
    slots = g.input("slots", (1,))
    g.call(
        "stage_hidden",
        hidden=g.retained(value),
        continuation=g.state("continuation", ("slots", value.spec.shape[-1])),
        slots=slots,
        committed=slots,
    )
    return g.build()


def test_a_sound_graph_passes_as_it_is() -> None:
    graph, _ = forward()
    assert check(graph) is graph


def test_a_node_without_effect_is_refused() -> None:
    graph, _ = forward(retain=False)
    with pytest.raises(GraphError, match=r"^residual_add: nothing reads its outputs"):
        check(graph)


def test_one_used_output_of_several_is_enough() -> None:
    g = GraphBuilder(FORWARD)
    positions = g.input("positions", (1, 1, 2))
    cos, _ = g.call("rotary_table", positions=positions, rotary_half=4, theta=10000.0, sections=())
    g.output(cos)
    check(g.build())


def test_a_weight_or_state_that_nothing_touches_is_refused() -> None:
    g, x = start()
    g.output(g.call("residual_add", x=x, y=x))
    g.weight("w", ("target/w",), (8,))
    with pytest.raises(GraphError, match=r"^weight 'w': declared, but no node reads it$"):
        check(g.build())
    g, x = start()
    g.output(g.call("residual_add", x=x, y=x))
    g.state("s", ("slots", 8))
    with pytest.raises(GraphError, match=r"^state 's': declared, but no node reads it$"):
        check(g.build())


def test_a_frame_field_may_go_unread() -> None:
    g, x = start()
    g.output(g.call("residual_add", x=x, y=x))
    g.input("slots", (1,))
    check(g.build())


def test_a_result_that_nothing_writes_is_refused() -> None:
    graph, _ = forward()
    spec = graph.values["x"].spec
    with pytest.raises(GraphError, match=r"^output 'lost': no node writes it$"):
        check(Graph(FORWARD, graph.nodes, {**graph.values, "lost": Value("lost", spec, "output")}))


def test_a_retained_value_is_handed_over() -> None:
    graph, y = forward()
    segments = (graph, finish(y))
    assert check_segments(segments) is segments


def test_a_retained_value_needs_an_earlier_writer() -> None:
    graph, y = forward()
    with pytest.raises(GraphError, match=r"^retained 'residual_add': finish .* reads it, but no "):
        check_segments((finish(y), graph))


@pytest.mark.parametrize("role", ["input", "weight", "state"])
def test_segments_mean_the_same_by_a_name(role: str) -> None:
    """An executor binds one tensor to it."""
    graph, y = forward()
    g = GraphBuilder(FINISH)
    hidden = g.retained(y)
    if role == "weight":
        weight = g.weight("x", ("target/x",), (8,))
        g.output(g.call("rms_norm", "norm", x=hidden, weight=weight, eps=1e-6, offset=True))
    else:
        slots = g.input("x" if role == "input" else "slots", (1,))
        state = g.state("x" if role == "state" else "state", ("slots", 8))
        where = {"continuation": state, "slots": slots, "committed": slots}
        g.call("stage_hidden", hidden=hidden, **where)
    with pytest.raises(GraphError, match=rf"^{role} 'x': forward .* has .* finish .* has "):
        check_segments((graph, g.build()))


def test_a_retained_value_keeps_its_spec() -> None:
    graph, y = forward()
    other = Value(y.name, type(y.spec)((1, 2, 9), "float32"), y.role)
    message = r"writes float32\[1, 2, 8\], finish .* float32\[1, 2, 9\]"
    with pytest.raises(GraphError, match=message):
        check_segments((graph, finish(other)))
