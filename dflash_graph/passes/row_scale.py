"""row_scale: a norm between two products becomes a factor of each row.

Before: a combined graph. After: where a product alone reads the norm that ends a branch, the
branch's end leaves rows that lack the norm's factor, and the sums of squares of its segments; the
product takes the factor after its sums. A branch's end is one launch then.

    linear_residual_norm linear           linear_residual_scale scaled_linear
    linear_residual_norm swiglu_linear    linear_residual_scale scaled_swiglu_linear
    linear_residual_norm gdn_project      linear_residual_scale scaled_gdn_project
"""

from __future__ import annotations

from dataclasses import replace

from dflash_graph.graph import Graph, Node, Value
from dflash_graph.tensor import TensorSpec

#: Channels whose squares are summed together.
SEGMENT = 64
_READERS = ("linear", "swiglu_linear", "gdn_project")


def row_scale(graph: Graph) -> Graph:
    """The graph with every norm that can be one as a factor."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for _, name in node.operands():
            readers.setdefault(name, []).append(node)
    values = dict(graph.values)
    made: dict[str, Node] = {}
    for end in graph.nodes:
        if end.op != "linear_residual_norm":
            continue
        value = values[end.outputs["n"]]
        (reader, *others) = readers.get(value.name, [None])
        width = int(value.spec.shape[-1])
        if reader is None or others or value.role != "scratch" or width % SEGMENT:
            continue
        if reader.op not in _READERS or reader.attributes.get("tiled", True) is not True:
            continue
        segments = width // SEGMENT
        squares = Value(
            f"{value.name}.squares",
            TensorSpec((*value.spec.shape[:-1], segments), "float32"),
            value.role,
        )
        scaled = replace(value, name=f"{value.name}.scaled")
        values |= {made_value.name: made_value for made_value in (scaled, squares)}
        del values[value.name]
        eps = end.attributes["eps"]
        made[end.name] = replace(
            end,
            op="linear_residual_scale",
            outputs={"out": end.outputs["out"], "z": scaled.name, "squares": squares.name},
            attributes={"segments": segments, "offset": end.attributes["offset"]},
        )
        row = "x" if reader.op == "gdn_project" else "z"
        kept = {k: v for k, v in reader.attributes.items() if k != "tiled"}
        made[reader.name] = replace(
            reader,
            op=f"scaled_{reader.op}",
            inputs={
                row: scaled.name,
                "squares": squares.name,
                "weight": reader.inputs["weight"],
            },
            attributes={**kept, "segments": segments, "eps": eps},
        )
    if not made:
        return graph
    return Graph(graph.key, [made.get(node.name, node) for node in graph.nodes], values)
