"""residual_add: sum of the residual stream and a branch.

Math:     out = x + y
Shapes:   x, y, out [B, W, H]
Numeric:  one rounding; row-invariant
Effects:  writes all of out; may take the place of x
Source:   spec "The target" (block), "The drafts" (block)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor


def reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y


OP = Op(
    name="residual_add",
    inputs={"x": tensor("B W H"), "y": tensor("B W H")},
    outputs={"out": tensor("B W H")},
    reference=reference,
    flops=lambda n: n.B * n.W * n.H,
    in_place={"out": "x"},
)
