"""embedding: rows of the embedding table, scaled.

Math:     x[b,i] = scale * table[ids[b,i]]
Shapes:   ids [B, W] int32; table [V, H]; x [B, W, H]
Numeric:  one rounding; row-invariant
Effects:  writes all of x
Raises:   IndexError from torch if an id is outside [0, V)
Source:   spec "The target" and "The drafts" (`input_embedding_scale`)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, ints, tensor, weight


def reference(ids: Tensor, table: Tensor, *, scale: float) -> Tensor:
    rows = table[ids.long()]
    return rows if scale == 1.0 else (rows.double() * scale).to(table.dtype)


OP = Op(
    name="embedding",
    inputs={"ids": ints("B W"), "table": weight("V H")},
    outputs={"x": tensor("B W H")},
    attributes={"scale": float},
    reference=reference,
    flops=lambda n: n.B * n.W * n.H,
    reads={"table": lambda n: n.B * n.W * n.H},
)
