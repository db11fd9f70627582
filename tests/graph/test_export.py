"""Exports: golden text, and pictures whose syntax holds and whose size a reader can take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_graph.errors import OptionError
from dflash_graph.export import Collapse, to_dot, to_json, to_mermaid, to_text
from dflash_graph.graph import Graph, GraphBuilder, GraphKey
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_prefill, declare_round

GOLDEN = Path(__file__).parent / "golden"
COLLAPSES: tuple[Collapse, ...] = (None, "layers", 1, 2, 3)

#: What would break a picture if it were not quoted.
AWKWARD = 'a "b" <c> & #d; `e` \\n [f] {g} | end'


def small(layers: int = 3) -> Graph:
    """Layers that are alike, a state that is read and then changed, every role."""
    key = GraphKey("forward", "eager", 1, 1, 2, "float32")
    g = GraphBuilder(key)
    slots = g.input("slots", (1,))
    continuation = g.state("target.continuation_hidden", ("slots", 8))
    with g.region("verify"):
        row = g.call("slot_hidden", continuation=continuation, slots=slots)
        table = g.weight("target.embed", ("target/embed_tokens.weight",), (16, 8))
        x = g.call("embedding", ids=g.input("ids", (1, 2)), table=table, scale=1.0)
        first = x
        for layer in range(layers):
            with g.region(f"layer.{layer}"):
                parts = (f"target/{layer}.q.weight", f"target/{layer}.k.weight")
                matrix = g.weight(f"target.{layer}.q_k", parts, (8, 8))
                with g.region("mixer"):
                    y = g.call("linear", "q_k", x=x, weight=matrix, tiled=True)
                x = g.call("residual_add", x=x, y=y)
        g.retain(x)
    with g.region("commit"):
        g.call("stage_hidden", hidden=x, continuation=continuation, slots=slots, committed=slots)
        joined = g.call("join_features", features=[first, x], blocks=2)
    g.output(joined)
    g.output(row)
    return g.build()


def awkward() -> Graph:
    g = GraphBuilder(GraphKey(AWKWARD, "eager", 0, 1, 1, "float32"))
    x = g.input(AWKWARD, (1, 1, 8), "float32")
    with g.region(AWKWARD):
        first = g.call("residual_add", AWKWARD, x=x, y=x)
        g.output(g.call("residual_add", "end", x=first, y=first))
    return g.build()


def compare(name: str, text: str, update: bool) -> None:
    path = GOLDEN / name
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; write it with --update-golden and review it"
    assert text == path.read_text(encoding="utf-8"), f"{name} changed; review with --update-golden"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("small.txt", lambda g: to_text(g), id="text"),
        pytest.param("small_values.txt", lambda g: to_text(g, values=True), id="text with values"),
        pytest.param("small.json", to_json, id="json"),
        pytest.param("small.dot", to_dot, id="dot"),
        pytest.param("small_layers.dot", lambda g: to_dot(g, collapse="layers"), id="dot, layers"),
        pytest.param("small.mmd", to_mermaid, id="mermaid"),
        pytest.param(
            "small_layers.mmd", lambda g: to_mermaid(g, collapse="layers"), id="mermaid, layers"
        ),
        pytest.param("small_depth.mmd", lambda g: to_mermaid(g, collapse=2), id="mermaid, depth"),
    ],
)
def test_renderings_are_golden(
    name: str, text: Callable[[Graph], str], update_golden: bool
) -> None:
    compare(name, text(small()), update_golden)


def test_text_has_a_line_a_node_and_the_hash() -> None:
    graph = small()
    lines = to_text(graph).splitlines()
    assert lines[0] == str(graph.key)
    assert graph.content_hash.startswith(lines[1].split()[1].rstrip(","))
    assert sum(" = " in line for line in lines) == len(graph.nodes)


def test_json_is_what_is_hashed() -> None:
    graph = small()
    document = json.loads(to_json(graph))
    assert document.pop("hash") == graph.content_hash
    assert document == json.loads(json.dumps(graph.to_dict()))


DOT_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|[{}\[\]=;,]|[A-Za-z_][A-Za-z_0-9]*|#\w+|\S')


def dot_tokens(text: str) -> list[str]:
    tokens = DOT_TOKEN.findall(text)
    assert "".join(tokens).replace(" ", "") == re.sub(r"\s", "", text), "nothing is outside a token"
    return tokens


class Dot:
    """A parser of the part of DOT that is written here; it accepts nothing else."""

    def __init__(self, text: str) -> None:
        self.tokens = dot_tokens(text)
        self.nodes: set[str] = set()
        self.edges: list[tuple[str, str]] = []
        self.clusters: list[str] = []
        self.take("digraph")
        self.block()
        assert not self.tokens

    def take(self, wanted: str | None = None) -> str:
        token = self.tokens.pop(0)
        assert wanted is None or token == wanted, (wanted, token)
        return token

    def block(self) -> None:
        self.take("{")
        while self.tokens[0] != "}":
            self.statement()
        self.take("}")

    def statement(self) -> None:
        name = self.take()
        assert re.fullmatch(r"[A-Za-z_]\w*", name), name
        if name == "subgraph":
            self.clusters.append(self.take())
            self.block()
        elif self.tokens[0] == "=":
            self.take("=")
            self.take()
        elif self.tokens[0] == "->":
            self.take("->")
            self.edges.append((name, self.take()))
            self.attributes()
        else:
            self.attributes()
            if name != "node":
                assert name not in self.nodes, f"{name} is declared twice"
                self.nodes.add(name)

    def attributes(self) -> None:
        self.take("[")
        while True:
            assert re.fullmatch(r"[a-z]+", self.take())
            self.take("=")
            self.take()
            if self.take() == "]":
                return


def check_dot(text: str) -> Dot:
    dot = Dot(text)
    assert len(set(dot.clusters)) == len(dot.clusters)
    assert {end for edge in dot.edges for end in edge} <= dot.nodes
    assert len(set(dot.edges)) == len(dot.edges)
    return dot


LABEL = r'"[^"<>&`\n]*(?:<br/>[^"<>&`\n]*)*"'
MERMAID_NODE = re.compile(rf"(n\d+)\[{LABEL}\]:::(?:op|changes|folded)")
MERMAID_GROUP = re.compile(rf"subgraph (r\d+) \[{LABEL}\]")
MERMAID_EDGE = re.compile(r"(n\d+) (?:-->|-\.->|==>) (n\d+)")


def check_mermaid(text: str) -> tuple[set[str], list[tuple[str, str]]]:
    """Every line has one of the forms we write, groups are closed, ends of edges exist."""
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "flowchart TB" and lines[1].startswith("%% ")
    nodes: set[str] = set()
    groups: list[str] = []
    edges: list[tuple[str, str]] = []
    depth = 0
    for line in lines[2:]:
        if match := MERMAID_NODE.fullmatch(line):
            assert match[1] not in nodes
            nodes.add(match[1])
        elif match := MERMAID_GROUP.fullmatch(line):
            groups.append(match[1])
            depth += 1
        elif match := MERMAID_EDGE.fullmatch(line):
            edges.append((match[1], match[2]))
        elif line == "end":
            depth -= 1
            assert depth >= 0
        else:
            assert re.fullmatch(r"classDef \w+ fill:#\w+,stroke:#\w+", line), line
    assert depth == 0 and len(set(groups)) == len(groups) and len(set(edges)) == len(edges)
    assert {end for edge in edges for end in edge} <= nodes
    return nodes, edges


def graphs(pair: ModelPair) -> Iterator[Graph]:
    yield from declare_round(pair, "eager", draft_tokens=7, batch=2).segments
    yield declare_prefill(pair, "eager", tokens=16)


@pytest.mark.parametrize("collapse", COLLAPSES)
def test_pictures_of_every_pair_are_well_formed(pair: ModelPair, collapse: Collapse) -> None:
    if pair.target.layers > 8 and collapse is None:
        return  # the same forms as of a small pair, a thousand times
    for graph in (*graphs(pair), small()):
        dot = check_dot(to_dot(graph, collapse=collapse))
        nodes, edges = check_mermaid(to_mermaid(graph, collapse=collapse))
        assert dot.nodes == nodes and dot.edges == edges, "both draw the same picture"
        if collapse is None:
            assert len(nodes) == len(graph.nodes) and len(edges) == len(graph.digraph.edges)


@pytest.mark.parametrize("collapse", COLLAPSES)
def test_everything_awkward_is_quoted(collapse: Collapse) -> None:
    check_dot(to_dot(awkward(), collapse=collapse))
    check_mermaid(to_mermaid(awkward(), collapse=collapse))


def test_alike_layers_are_drawn_once() -> None:
    text = to_mermaid(small(layers=5), collapse="layers")
    assert text.count("layer.0 .. x5") == 1
    assert "layer.1" not in text
    assert "==>" in text, "what a layer hands to the next one like it"


def test_a_layer_of_another_kind_is_kept() -> None:
    key = GraphKey("forward", "eager", 0, 1, 1, "float32")
    g = GraphBuilder(key)
    x = g.input("x", (1, 1, 8), "float32")
    norm = g.weight("w", ("target/w",), (8,))
    for layer, eps in enumerate((1e-6, 1e-6, 1e-5)):
        with g.region(f"layer.{layer}"):
            x = g.call("rms_norm", x=x, weight=norm, eps=eps, offset=True)
    text = to_mermaid(g.build(), collapse="layers")
    assert "layer.0 .. x2" in text and '"layer.2"' in text and "layer.1" not in text


def test_a_collapsed_27b_is_readable(large_pair: ModelPair) -> None:
    for graph in graphs(large_pair):
        limits: dict[Collapse, int] = {"layers": 250, 1: 25, 2: 300}
        for collapse, most in limits.items():
            assert len(to_dot(graph, collapse=collapse).splitlines()) <= most
            assert len(to_mermaid(graph, collapse=collapse).splitlines()) <= most


@pytest.mark.parametrize("collapse", ["layer", 0, -1, True])
def test_another_collapse_is_refused(collapse: Collapse) -> None:
    with pytest.raises(OptionError, match="collapse: expected 'layers', a depth from 1, or None"):
        to_dot(small(), collapse=collapse)
