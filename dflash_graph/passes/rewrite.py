"""rewrite: a graph while patterns of it are replaced by other nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dflash_graph.errors import GraphError
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
        self._stand_ins: dict[str, Sequence[Node]] = {}  # replaced node -> what came for it

    def left(self, op: str) -> list[Node]:
        """Nodes of an op that no pattern has taken."""
        return [n for n in self.graph.nodes if n.op == op and n.name not in self._stand_ins]

    def readers(self, value: str, op: str) -> list[Node]:
        """Nodes of an op that read a value."""
        return [node for node in self._readers.get(value, ()) if node.op == op]

    def only_reader(self, value: str, op: str) -> Node | None:
        """The one node that reads a scratch value, if it is of this op and not taken yet."""
        found = self._readers.get(value, [])
        if self.graph.values[value].role != "scratch" or len(found) != 1:
            return None
        node = found[0]
        return node if node.op == op and node.name not in self._stand_ins else None

    def producer(self, value: str, op: str) -> Node | None:
        """The node that writes a value, if it is of this op and not taken yet."""
        node = self.graph.producer(value)
        return node if node and node.op == op and node.name not in self._stand_ins else None

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
        self._stand_ins.update(dict.fromkeys(names, new))
        self._new[place.name if place else max(names, key=order.index)] = list(new)

    def result(self) -> Graph:
        """The graph with what was replaced; the graph itself where nothing was.

        Raises:
            GraphError: a state would be read or changed in another order.
        """
        if not self._stand_ins:
            return self.graph
        nodes = [made for node in self.graph.nodes for made in self._standing(node)]
        self._check_states({node.name: index for index, node in enumerate(nodes)})
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
        elif node.name not in self._stand_ins:
            yield node

    def _check_states(self, places: Mapping[str, int]) -> None:
        """Patterns look at values; what one node leaves in a state for another is seen here.

        Args:
            places: of the nodes that there are now, by name.
        """
        for value in self.graph.by_role("state"):
            changed = read = -1  # the last place so far where the state is
            for node in self._readers.get(value.name, ()):
                updates = value.name in node.updates()
                now = [
                    places[made.name]
                    for made in self._stand_ins.get(node.name, (node,))
                    if value.name in {name for _, name in made.operands()}
                    and (value.name in made.updates()) == updates
                ]
                if not now or min(now) < (max(changed, read) if updates else changed):
                    raise GraphError(
                        f"{node.name}: what stands for it would find {value.name!r} as another "
                        "node left it; declare what uses a state side by side"
                    )
                changed, read = (max(now), read) if updates else (changed, max(read, *now))
