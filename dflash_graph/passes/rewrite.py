"""rewrite: a graph while patterns of it are replaced by other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dflash_graph.graph import Graph, Node, Value
from dflash_graph.tensor import TensorSpec, WeightUse


class Rewrite:
    """A graph, and which of its nodes were replaced by which new ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values: dict[str, Value] = dict(graph.values)
        self._readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for _, name in node.operands():
                self._readers.setdefault(name, []).append(node)
        self._new: dict[str, list[Node]] = {}  # last replaced node -> what stands in its place
        self._gone: set[str] = set()

    def left(self, op: str) -> list[Node]:
        """Nodes of an op that no pattern has taken."""
        return [n for n in self.graph.nodes if n.op == op and n.name not in self._gone]

    def readers(self, value: str, op: str) -> list[Node]:
        """Nodes of an op that read a value."""
        return [node for node in self._readers.get(value, ()) if node.op == op]

    def only_reader(self, value: str, op: str) -> Node | None:
        """The one node that reads a scratch value, if it is of this op and not taken yet."""
        found = self._readers.get(value, [])
        if self.graph.values[value].role != "scratch" or len(found) != 1:
            return None
        node = found[0]
        return node if node.op == op and node.name not in self._gone else None

    def producer(self, value: str, op: str) -> Node | None:
        """The node that writes a value, if it is of this op and not taken yet."""
        node = self.graph.producer(value)
        return node if node and node.op == op and node.name not in self._gone else None

    def weight(self, name: str, parts: Sequence[str], spec: TensorSpec) -> str:
        """A weight that the graph did not have; returns its name."""
        self.values[name] = Value(name, spec, "weight", WeightUse(tuple(parts), spec))
        return name

    def correction(self, value: str) -> str:
        """The record that stands in the place of the record v of a delta rule; returns its name."""
        v = self.values[value]
        name = value.removesuffix(".v") + ".u"
        self.values[name] = Value(name, TensorSpec(v.spec.shape, "float32"), v.role)
        return name

    def replace(self, old: Iterable[Node], new: Sequence[Node], place: Node | None = None) -> None:
        """Let `new` stand where `place`, or the last of `old`, stood."""
        names = [node.name for node in old]
        order = [node.name for node in self.graph.nodes]
        self._gone.update(names)
        self._new[place.name if place else max(names, key=order.index)] = list(new)

    def result(self) -> Graph:
        """The graph with what was replaced; the graph itself where nothing was."""
        if not self._gone:
            return self.graph
        nodes = [made for node in self.graph.nodes for made in self._standing(node)]
        used = {name for node in nodes for _, name in node.operands()}
        used |= {name for node in nodes for name in node.outputs.values()}
        values = {
            name: value
            for name, value in self.values.items()
            if name in used or value.role == "input"
        }
        return Graph(self.graph.key, nodes, values)

    def _standing(self, node: Node) -> Iterator[Node]:
        if node.name in self._new:
            yield from self._new[node.name]
        elif node.name not in self._gone:
            yield node
