"""linear: product of rows with a weight.

Math:     y[b,i] = weight x[b,i]
Shapes:   x [B, W, I]; weight [O, I]; y [B, W, O]
Numeric:  float32 accumulation, one rounding; row-invariant if `tiled`, else one GEMM over all rows
          (prefill)
Effects:  writes all of y
Source:   spec "The target", "The drafts"
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import matmul_rows
from dflash_graph.op import Op, tensor, weight


def reference(x: Tensor, weight: Tensor, *, tiled: bool) -> Tensor:
    return matmul_rows(x, weight, tiled=tiled)


OP = Op(
    name="linear",
    inputs={"x": tensor("B W I"), "weight": weight("O I")},
    outputs={"y": tensor("B W O")},
    attributes={"tiled": bool},
    reference=reference,
    flops=lambda n: 2 * n.B * n.W * n.I * n.O,
)
