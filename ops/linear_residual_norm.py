"""linear_residual_norm: a branch's last product, its sum with the residual stream, the next norm.

Math:     out = residual_add(x, linear(y, weight));  n = rms_norm(out, norm)
Shapes:   y [B, W, I]; weight [O, I]; x, out, n [B, W, O]; norm [O]
Numeric:  as the three ops: the product and the sum are each rounded to the model dtype;
          row-invariant
Effects:  writes all of out and n; out may take the place of x
Source:   spec "The target" (block), "The drafts" (block)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import linear, residual_add, rms_norm


def reference(
    y: Tensor, weight: Tensor, x: Tensor, norm: Tensor, *, eps: float, offset: bool
) -> tuple[Tensor, Tensor]:
    out = residual_add.reference(x, linear.reference(y, weight, tiled=True))
    return out, rms_norm.reference(out, norm, eps=eps, offset=offset)


OP = Op(
    name="linear_residual_norm",
    inputs={
        "y": tensor("B W I"),
        "weight": weight("O I"),
        "x": tensor("B W O"),
        "norm": weight("O"),
    },
    outputs={"out": tensor("B W O"), "n": tensor("B W O")},
    attributes={"eps": float, "offset": bool},
    reference=reference,
    flops=lambda n: n.B * n.W * n.O * (2 * n.I + 5),
    in_place={"out": "x"},
)
