"""scaled_gdn_project: the products that open a Gated DeltaNet layer, of rows with a factor each.

Math:     [columns | z | ba] = scaled_linear(x, squares, weight)
Shapes:   x [B, W, 64*segments]; squares [B, W, segments] float32;
          weight [channels+value_width+2*heads, 64*segments]; columns [B, W, channels];
          z [B, W, value_width]; ba [B, W, 2*heads]
Numeric:  as scaled_linear; row-invariant
Effects:  writes all of columns, z and ba
Source:   spec "The target" (Gated DeltaNet: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import scaled_linear


def reference(
    x: Tensor,
    squares: Tensor,
    weight: Tensor,
    *,
    channels: int,
    value_width: int,
    heads: int,
    segments: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    features = scaled_linear.reference(x, squares, weight, segments=segments, eps=eps)
    parts = features.split((channels, value_width, 2 * heads), -1)
    columns, z, ba = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return columns, z, ba


OP = Op(
    name="scaled_gdn_project",
    inputs={
        "x": tensor("B W 64*segments"),
        "squares": tensor("B W segments", "float32"),
        "weight": weight("channels+value_width+2*heads 64*segments"),
    },
    outputs={
        "columns": tensor("B W channels"),
        "z": tensor("B W value_width"),
        "ba": tensor("B W 2*heads"),
    },
    attributes={"channels": int, "value_width": int, "heads": int, "segments": int, "eps": float},
    reference=reference,
    flops=lambda n: n.B * n.W * (128 * n.segments + 1) * (n.channels + n.value_width + 2 * n.heads),
)
