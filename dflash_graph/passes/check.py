"""check: what every graph must satisfy between passes, beyond what its constructor enforces.

Before: any `Graph`. After: the same graph, and it is known that nothing in it is dead or left
dangling. Only a field of the input frame may go unread: frames are alike for all targets, and one
without recurrent layers asks for no slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_graph.errors import GraphError
from dflash_graph.graph import Graph, Value


def check(graph: Graph) -> Graph:
    """Return `graph` if it is sound.

    Raises:
        GraphError: a node has no effect, a weight or state is never touched, or a result is never
            written.
    """
    read = {name for node in graph.nodes for _, name in node.operands()}
    written = {name for node in graph.nodes for name in node.outputs.values()}
    for node in graph.nodes:
        kept = [
            name
            for name in node.outputs.values()
            if name in read or graph.values[name].role in ("retained", "output")
        ]
        if not kept and not node.updates():
            raise GraphError(
                f"{node.name}: nothing reads its outputs and it changes no state; remove the call"
            )
    for value in graph.values.values():
        if value.role in ("weight", "state") and value.name not in read:
            raise GraphError(f"{value.role} {value.name!r}: declared, but no node reads it")
        if value.role in ("scratch", "output") and value.name not in written:
            raise GraphError(f"{value.role} {value.name!r}: no node writes it")
    return graph


def check_segments(segments: Sequence[Graph]) -> Sequence[Graph]:
    """Check the segments of a round and that each retained value is kept for somebody.

    Raises:
        GraphError: as `check`, a segment reads a retained value that no earlier one writes with
            that spec, or two mean different inputs, weights or states by one name.
    """
    written: dict[str, Graph] = {}
    shared: dict[str, tuple[Value, Graph]] = {}
    for graph in segments:
        check(graph)
        for value in graph.by_role("input", "weight", "state"):
            first, where = shared.setdefault(value.name, (value, graph))
            if first != value:
                raise GraphError(
                    f"{value.role} {value.name!r}: {where.key} has {first}, {graph.key} has {value}"
                )
        for value in graph.by_role("retained"):
            if graph.producer(value.name) is not None:
                written[value.name] = graph
            elif value.name not in written:
                raise GraphError(
                    f"retained {value.name!r}: {graph.key} reads it, but no earlier segment "
                    "writes it"
                )
            elif written[value.name].values[value.name].spec != value.spec:
                raise GraphError(
                    f"retained {value.name!r}: {written[value.name].key} writes "
                    f"{written[value.name].values[value.name].spec}, {graph.key} reads {value.spec}"
                )
    return segments
