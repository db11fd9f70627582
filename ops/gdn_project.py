"""gdn_project: the products that open a Gated DeltaNet layer, over one stacked weight.

Math:     [columns | z | ba] = linear(x, weight)
Shapes:   x [B, W, H]; weight [channels+value_width+2*heads, H]; columns [B, W, channels];
          z [B, W, value_width]; ba [B, W, 2*heads]
Numeric:  float32 accumulation, one rounding; row-invariant
Effects:  writes all of columns, z and ba
Source:   spec "The target" (Gated DeltaNet: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import linear


def reference(
    x: Tensor, weight: Tensor, *, channels: int, value_width: int, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    parts = linear.reference(x, weight, tiled=True).split((channels, value_width, 2 * heads), -1)
    columns, z, ba = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return columns, z, ba


OP = Op(
    name="gdn_project",
    inputs={"x": tensor("B W H"), "weight": weight("channels+value_width+2*heads H")},
    outputs={
        "columns": tensor("B W channels"),
        "z": tensor("B W value_width"),
        "ba": tensor("B W 2*heads"),
    },
    attributes={"channels": int, "value_width": int, "heads": int},
    reference=reference,
    flops=lambda n: 2 * n.B * n.W * n.H * (n.channels + n.value_width + 2 * n.heads),
)
