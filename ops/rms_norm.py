"""rms_norm: root-mean-square norm over the width.

Math:     y = s * x / sqrt(mean(x^2) + eps),  s = 1 + w (offset) or w
Shapes:   x, y [B, W, H]; weight [H]
Numeric:  evaluated unrounded, one rounding at the store; row-invariant
Effects:  writes all of y; may take the place of x
Source:   spec "The target" (offset: weights stored around zero) and "The drafts" (plain)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import mean_square_scale
from dflash_graph.op import Op, tensor, weight


def reference(x: Tensor, weight: Tensor, *, eps: float, offset: bool) -> Tensor:
    scale = weight.double() + 1.0 if offset else weight.double()
    return (x.double() * mean_square_scale(x, eps) * scale).to(x.dtype)


OP = Op(
    name="rms_norm",
    inputs={"x": tensor("B W H"), "weight": weight("H")},
    outputs={"y": tensor("B W H")},
    attributes={"eps": float, "offset": bool},
    reference=reference,
    flops=lambda n: 4 * n.B * n.W * n.H,
    in_place={"y": "x"},
)
