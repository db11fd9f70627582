"""scaled_swiglu_linear: gate and up products of rows with a factor each, and their activation.

Math:     y = swiglu(scaled_linear(z, squares, weight)), the gate's rows of weight before up's
Shapes:   z [B, W, 64*segments]; squares [B, W, segments] float32;
          weight [2*ffn_width, 64*segments]; y [B, W, ffn_width]
Numeric:  as swiglu_linear; row-invariant
Effects:  writes all of y
Source:   spec "The target" (block)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import scaled_linear, swiglu


def reference(
    z: Tensor, squares: Tensor, weight: Tensor, *, ffn_width: int, segments: int, eps: float
) -> Tensor:
    features = scaled_linear.reference(z, squares, weight, segments=segments, eps=eps)
    return swiglu.reference(features, ffn_width=ffn_width)


OP = Op(
    name="scaled_swiglu_linear",
    inputs={
        "z": tensor("B W 64*segments"),
        "squares": tensor("B W segments", "float32"),
        "weight": weight("2*ffn_width 64*segments"),
    },
    outputs={"y": tensor("B W ffn_width")},
    attributes={"ffn_width": int, "segments": int, "eps": float},
    reference=reference,
    flops=lambda n: n.B * n.W * n.ffn_width * (256 * n.segments + 6),
)
