"""swiglu_linear: the gate and up products of a feed-forward network and its activation.

Math:     y = swiglu(linear(x, weight)), the gate's rows of weight before the up rows
Shapes:   x [B, W, I]; weight [2*ffn_width, I]; y [B, W, ffn_width]
Numeric:  float32 accumulation; gate and up rounded to the model dtype, then evaluated unrounded and
          rounded at the store; row-invariant
Effects:  writes all of y
Source:   spec "The target" (block), "The drafts" (block)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import linear, swiglu


def reference(x: Tensor, weight: Tensor, *, ffn_width: int) -> Tensor:
    return swiglu.reference(linear.reference(x, weight, tiled=True), ffn_width=ffn_width)


OP = Op(
    name="swiglu_linear",
    inputs={"x": tensor("B W I"), "weight": weight("2*ffn_width I")},
    outputs={"y": tensor("B W ffn_width")},
    attributes={"ffn_width": int},
    reference=reference,
    flops=lambda n: n.B * n.W * n.ffn_width * (4 * n.I + 4),
)
