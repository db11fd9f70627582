"""linear_norm: a product and the RMS norm of its result.

Math:     y = linear(x, weight);  n = rms_norm(y, norm)
Shapes:   x [B, W, I]; weight [O, I]; norm [O]; n [B, W, O]
Numeric:  as the two ops: y is rounded to the model dtype; row-invariant
Effects:  writes all of n; y is stored nowhere
Source:   spec "The drafts" (Context: c_t)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import linear, rms_norm


def reference(x: Tensor, weight: Tensor, norm: Tensor, *, eps: float, offset: bool) -> Tensor:
    y = linear.reference(x, weight, tiled=True)
    return rms_norm.reference(y, norm, eps=eps, offset=offset)


OP = Op(
    name="linear_norm",
    inputs={"x": tensor("B W I"), "weight": weight("O I"), "norm": weight("O")},
    outputs={"n": tensor("B W O")},
    attributes={"eps": float, "offset": bool},
    reference=reference,
    flops=lambda n: n.B * n.W * n.O * (2 * n.I + 4),
)
