"""Graphs: what the builder declares, what a graph refuses, its hazard edges, identity and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import networkx as nx
import pytest

from dflash_graph.errors import GraphError
from dflash_graph.export import to_json, to_text
from dflash_graph.graph import Edge, Graph, GraphBuilder, GraphKey, Node, Value
from dflash_graph.op import Cost
from dflash_graph.tensor import TensorSpec, WeightUse

KEY = GraphKey("forward", "eager", 0, 2, 3, "float32")
X = TensorSpec((2, 3, 8), "float32")


def small(
    key: GraphKey = KEY, *, eps: float = 1e-6, width: int = 8, part: str = "a", retain: bool = False
) -> Graph:
    """norm -> product -> residual, each in the region of a layer."""
    g = GraphBuilder(key)
    ids = g.input("ids", (2, 3))
    with g.region("verify"):
        table = g.weight("table", ("target/embed_tokens.weight",), (16, width))
        x = g.call("embedding", ids=ids, table=table, scale=1.0)
        with g.region("layer.0"):
            norm = g.weight("norm", (f"target/{part}.weight",), (width,))
            n = g.call("rms_norm", "norm", x=x, weight=norm, eps=eps, offset=True)
            matrix = g.weight("matrix", ("target/q.weight", "target/k.weight"), (width, width))
            y = g.call("linear", x=n, weight=matrix, tiled=True)
            total = g.call("residual_add", "residual", x=x, y=y)
    if retain:
        g.retain(n)
    g.retain(total)
    return g.build()


def norm_node(name: str, x: str, y: str, **changes: Any) -> Node:
    fields = {
        "name": name,
        "op": "rms_norm",
        "region": "",
        "inputs": {"x": x, "weight": "w"},
        "outputs": {"y": y},
        "attributes": {"eps": 1e-6, "offset": True},
    }
    return Node(**{**fields, **changes})


def values(*scratch: str, **others: Value) -> dict[str, Value]:
    named = {
        "x": Value("x", X, "input"),
        "w": Value("w", TensorSpec((8,), "float32"), "weight", WeightUse(("t/w",), X)),
    }
    return named | {name: Value(name, X, "scratch") for name in scratch} | others


def test_the_builder_names_nodes_and_values_by_region() -> None:
    graph = small()
    assert [node.name for node in graph.nodes] == [
        "verify/embedding",
        "verify/layer.0/norm",
        "verify/layer.0/linear",
        "verify/layer.0/residual",
    ]
    assert [node.name for node in graph.region_nodes("verify/layer.0")] == [
        node.name for node in graph.nodes[1:]
    ]
    assert [value.name for value in graph.by_role("weight")] == ["table", "norm", "matrix"]
    assert [value.name for value in graph.by_role("retained")] == ["verify/layer.0/residual"]
    assert graph.values["verify/layer.0/linear"].spec == X
    assert graph.producer("verify/embedding") is graph.nodes[0]
    assert graph.producer("ids") is None
    assert graph.digraph.edges["verify/embedding", "verify/layer.0/residual"]["edge"] == Edge(
        values=("verify/embedding",)
    )


def test_a_label_that_repeats_in_a_region_is_numbered() -> None:
    g = GraphBuilder(KEY)
    x = g.input("x", (2, 3, 8), "float32")
    first = g.call("residual_add", x=x, y=x)
    second = g.call("residual_add", x=first, y=x)
    assert (first.name, second.name) == ("residual_add", "residual_add.2")


def test_several_outputs_are_named_after_the_contract() -> None:
    g = GraphBuilder(KEY)
    positions = g.input("positions", (1, 2, 3))
    tables = g.call("rotary_table", positions=positions, rotary_half=4, theta=10000.0, sections=())
    assert [table.name for table in tables] == ["rotary_table.cos", "rotary_table.sin"]


def test_an_op_with_state_effects_only_returns_nothing() -> None:
    g = GraphBuilder(KEY)
    made = g.call(
        "stage_hidden",
        hidden=g.input("hidden", (2, 3, 8), "float32"),
        continuation=g.state("continuation", ("slots", 8)),
        slots=g.input("slots", (2,)),
        committed=g.input("committed", (2,)),
    )
    assert made is None
    assert g.build().nodes[0].updates() == ("continuation",)


@pytest.mark.parametrize(
    ("nodes", "known", "message"),
    [
        pytest.param(
            [norm_node("a", "nothing", "y")], values("y"),
            r"^a\.x: value 'nothing' does not exist", id="unknown value",
        ),
        pytest.param(
            [norm_node("a", "x", "y"), norm_node("b", "x", "y")], values("y"),
            r"^b: writes 'y', already written by a$", id="double write",
        ),
        pytest.param(
            [norm_node("a", "z", "y"), norm_node("b", "x", "z")], values("y", "z"),
            r"^a\.x: reads 'z', which no earlier node writes$", id="reading what comes later",
        ),
        pytest.param(
            [norm_node("a", "r", "y"), norm_node("b", "x", "r")],
            values("y", r=Value("r", X, "retained")),
            r"^a\.x: reads 'r', which no earlier node writes$", id="retained later",
        ),
        pytest.param(
            [norm_node("a", "x", "y"), norm_node("a", "y", "z")], values("y", "z"),
            r"^a: two nodes have this name", id="duplicate name",
        ),
        pytest.param(
            [norm_node("a", "x", "w")], values(),
            r"^a: writes 'w', which is no scratch, retained or output value$", id="writes a weight",
        ),
        pytest.param(
            [norm_node("a", "x", "y", attributes={"eps": 1e-6})], values("y"),
            r"^a: expected attributes .* missing \['offset'\]", id="contract: attributes",
        ),
        pytest.param(
            [norm_node("a", "x", "y")],
            values("y") | {"w": Value("w", TensorSpec((9,), "float32"), "weight")},
            r"^a\.weight: axis 0 of weight must be 8 \(H from axis 2 of x\), got 9$",
            id="contract: shape",
        ),
        pytest.param(
            [norm_node("a", "x", "y")],
            values(y=Value("y", TensorSpec((2, 3, 9), "float32"), "scratch")),
            r"^a: outputs are declared as .*9.*, rms_norm gives", id="declared output",
        ),
    ],
)  # fmt: skip
def test_a_graph_refuses_with_the_name_of_the_node(
    nodes: list[Node], known: dict[str, Value], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        Graph(KEY, nodes, known)


def test_only_state_is_changed_in_place() -> None:
    known = {
        "hidden": Value("hidden", X, "input"),
        "rows": Value("rows", TensorSpec(("slots", 8), "float32"), "input"),
        "slots": Value("slots", TensorSpec((2,), "int32"), "input"),
    }
    inputs = {"hidden": "hidden", "continuation": "rows", "slots": "slots", "committed": "slots"}
    with pytest.raises(
        GraphError, match=r"^stage\.continuation: changes 'rows', whose role is 'in"
    ):
        Graph(KEY, [Node("stage", "stage_hidden", "", inputs, {}, {})], known)


def test_the_builder_refuses_with_the_name_of_the_node() -> None:
    g = GraphBuilder(KEY)
    x, y = g.input("x", (2, 3, 8), "float32"), g.input("y", (2, 3, 9), "float32")
    with (
        g.region("verify"),
        pytest.raises(GraphError, match=r"^verify/sum\.y: axis 2 of y must be"),
    ):
        g.call("residual_add", "sum", x=x, y=y)
    with pytest.raises(GraphError, match="value 'x' is declared as"):
        g.input("x", (2, 3, 9), "float32")
    with pytest.raises(GraphError, match="only scratch becomes output, it is input"):
        g.output(x)


def use(name: str, *, writes: bool) -> Callable[[GraphBuilder], None]:
    """Declare a reader or writer of the state `continuation`."""

    def declare(g: GraphBuilder) -> None:
        continuation, slots = g.state("continuation", ("slots", 8)), g.input("slots", (2,))
        if writes:
            hidden = g.input("hidden", (2, 3, 8), "float32")
            g.call(
                "stage_hidden", name, hidden=hidden, continuation=continuation,
                slots=slots, committed=slots,
            )  # fmt: skip
        else:
            g.call("slot_hidden", name, continuation=continuation, slots=slots)

    return declare


@pytest.mark.parametrize(
    ("writes", "ordered"),
    [
        pytest.param((True, False), {("0", "1")}, id="read after write"),
        pytest.param((False, True), {("0", "1")}, id="write after read"),
        pytest.param((True, True), {("0", "1")}, id="write after write"),
        pytest.param((False, False), set(), id="readers are free"),
        pytest.param(
            (True, False, False, True, False),
            {("0", "1"), ("0", "2"), ("0", "3"), ("1", "3"), ("2", "3"), ("3", "4")},
            id="all at once",
        ),
    ],
)
def test_hazard_edges_order_users_of_a_state(
    writes: tuple[bool, ...], ordered: set[tuple[str, str]]
) -> None:
    g = GraphBuilder(KEY)
    for index, is_writer in enumerate(writes):
        use(str(index), writes=is_writer)(g)
    graph = g.build()
    assert set(graph.digraph.edges) == ordered
    for _, _, edge in graph.digraph.edges(data="edge"):
        assert edge == Edge(hazards=("continuation",))


def test_different_states_are_independent() -> None:
    g = GraphBuilder(KEY)
    for name in ("a", "b"):
        g.call(
            "stage_hidden",
            name,
            hidden=g.input("hidden", (2, 3, 8), "float32"),
            continuation=g.state(f"{name}.continuation", ("slots", 8)),
            slots=g.input("slots", (2,)),
            committed=g.input("committed", (2,)),
        )
    assert not g.build().digraph.edges


def test_program_order_is_topological() -> None:
    graph = small()
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    assert nx.is_directed_acyclic_graph(graph.digraph)
    assert all(position[before] < position[after] for before, after in graph.digraph.edges)


def test_equal_declarations_are_equal_in_every_form() -> None:
    first, second = small(), small()
    assert first is not second
    assert first.content_hash == second.content_hash
    assert to_text(first, values=True) == to_text(second, values=True)
    assert to_json(first) == to_json(second)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: small(eps=1e-5), id="attribute"),
        pytest.param(lambda: small(width=16), id="spec"),
        pytest.param(lambda: small(retain=True), id="role"),
        pytest.param(lambda: small(part="b"), id="weight part"),
        pytest.param(lambda: small(replace(KEY, segment="finish")), id="segment"),
        pytest.param(lambda: small(replace(KEY, backend="inductor")), id="backend"),
        pytest.param(lambda: small(replace(KEY, draft_tokens=1)), id="draft tokens"),
        pytest.param(lambda: small(replace(KEY, batch=3)), id="batch"),
        pytest.param(lambda: small(replace(KEY, columns=4)), id="columns"),
        pytest.param(lambda: small(replace(KEY, dtype="bfloat16")), id="dtype"),
    ],
)
def test_every_change_changes_the_hash(other: Callable[[], Graph]) -> None:
    assert other().content_hash != small().content_hash


def test_capacities_are_names_in_the_hash() -> None:
    g = GraphBuilder(KEY)
    use("read", writes=False)(g)
    assert g.build().to_dict()["values"][0]["shape"] == ["slots", 8]


def test_cost_is_the_sum_of_what_nodes_move() -> None:
    costs = small().cost()
    rows = 2 * 3 * 8 * 4  # bytes of one activation
    assert costs == {
        # ids, the rows looked up; x
        "verify/embedding": Cost(2 * 3 * 4 + rows, rows, 2 * 3 * 8),
        "verify/layer.0/norm": Cost(rows + 8 * 4, rows, 4 * 2 * 3 * 8),
        "verify/layer.0/linear": Cost(rows + 8 * 8 * 4, rows, 2 * 2 * 3 * 8 * 8),
        "verify/layer.0/residual": Cost(2 * rows, rows, 2 * 3 * 8),
    }
    total = sum(costs.values(), Cost())
    assert total.read_bytes == sum(cost.read_bytes for cost in costs.values())
    assert total.bytes == total.read_bytes + total.write_bytes
