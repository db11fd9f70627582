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
from dflash_graph.passes.rewrite import Rewrite
from dflash_graph.tensor import TensorSpec

#: Channels whose squares are summed together.
SEGMENT = 64
_READERS = ("linear", "swiglu_linear", "gdn_project")


def row_scale(graph: Graph) -> Graph:
    """The graph with every norm that can be one as a factor."""
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        if node.op == "linear_residual_norm":
            _scale(rewrite, node)
    return rewrite.result()


def _scale(rewrite: Rewrite, end: Node) -> None:
    """Move the factor of a branch's end into the product that reads its norm, if one alone does."""
    value = rewrite.graph.values[end.outputs["n"]]
    reader = next(filter(None, (rewrite.only_reader(value.name, op) for op in _READERS)), None)
    width = int(value.spec.shape[-1])
    if reader is None or reader.attributes.get("tiled", True) is not True or width % SEGMENT:
        return
    segments = width // SEGMENT
    scaled = replace(value, name=f"{value.name}.scaled")
    spec = TensorSpec((*value.spec.shape[:-1], segments), "float32")
    squares = Value(f"{value.name}.squares", spec, value.role)
    rewrite.values |= {scaled.name: scaled, squares.name: squares}
    scaling = replace(
        end,
        op="linear_residual_scale",
        outputs={"out": end.outputs["out"], "z": scaled.name, "squares": squares.name},
        attributes={"segments": segments, "offset": end.attributes["offset"]},
    )
    rewrite.replace([end], [scaling])
    row = "x" if reader.op == "gdn_project" else "z"
    kept = {k: v for k, v in reader.attributes.items() if k != "tiled"}
    product = replace(
        reader,
        op=f"scaled_{reader.op}",
        inputs={row: scaled.name, "squares": squares.name, "weight": reader.inputs["weight"]},
        attributes={**kept, "segments": segments, "eps": end.attributes["eps"]},
    )
    rewrite.replace([reader], [product])
