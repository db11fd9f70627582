"""schedule: a total order that respects every edge and depends on nothing but the graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflash_graph.graph import Graph, GraphBuilder, GraphKey, Value
from dflash_graph.passes.schedule import schedule

KEY = GraphKey("forward", "eager", 0, 1, 1, "float32")

#: Per node: which earlier values it adds, and whether it also reads or writes the one state.
Recipe = list[tuple[int, int, str]]

recipes = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from(["add", "read", "write"])),
    min_size=1,
    max_size=30,
)


def build(recipe: Recipe) -> Graph:
    """A random DAG: sums of earlier values, and readers and writers of a state among them."""
    g = GraphBuilder(KEY)
    slots = g.input("slots", (1,))
    continuation = g.state("continuation", ("slots", 8))
    made: list[Value] = [g.input("x", (1, 1, 8), "float32")]
    for first, second, kind in recipe:
        a, b = made[first % len(made)], made[second % len(made)]
        if kind == "add":
            made.append(g.call("residual_add", x=a, y=b))
        elif kind == "read":
            made.append(g.call("slot_hidden", continuation=continuation, slots=slots))
        else:
            g.call(
                "stage_hidden", hidden=a, continuation=continuation, slots=slots, committed=slots
            )
    return g.build()


@given(recipes)
def test_every_edge_is_respected(recipe: Recipe) -> None:
    graph = build(recipe)
    found = schedule(graph)
    position = {step.nodes[0].name: index for index, step in enumerate(found.steps)}
    assert len(position) == len(found.steps) == len(graph.nodes)
    assert all(len(step.nodes) == 1 and step.kind == "op" for step in found.steps)
    assert all(position[before] < position[after] for before, after in graph.digraph.edges)


@given(recipes)
def test_equal_graphs_have_equal_schedules(recipe: Recipe) -> None:
    first, second = build(recipe), build(recipe)
    assert schedule(first).steps == schedule(second).steps


@given(recipes)
def test_ties_go_to_program_order(recipe: Recipe) -> None:
    graph = build(recipe)
    assert [step.nodes[0] for step in schedule(graph).steps] == list(graph.nodes)


@given(recipes)
def test_readers_and_stored_values(recipe: Recipe) -> None:
    graph = build(recipe)
    found = schedule(graph)
    for name in graph.values:
        expected = [
            index
            for index, node in enumerate(graph.nodes)
            if name in (operand for _, operand in node.operands())
        ]
        assert found.readers(name) == expected
    stored = dict((name, index) for index, name in found.stored())
    for index, node in enumerate(graph.nodes):
        assert found.inputs(index) == tuple(dict.fromkeys(name for _, name in node.operands()))
        for name in node.outputs.values():
            assert stored.pop(name) == index
    assert not stored


def test_a_step_stands_in_the_first_two_parts_of_its_region() -> None:
    g = GraphBuilder(KEY)
    x = g.input("x", (1, 1, 8), "float32")
    with g.region("verify"), g.region("layer.0"), g.region("mixer"):
        g.output(g.call("residual_add", "sum", x=x, y=x))
    (step,) = schedule(g.build()).steps
    assert step.region == "verify/layer.0"
    assert step.name == "verify/layer.0/mixer/sum"
