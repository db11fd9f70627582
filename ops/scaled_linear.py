"""scaled_linear: product of rows, each with a factor of its own, with a weight.

Math:     y[b,i] = weight z[b,i] / sqrt(sum(squares[b,i]) / (64 segments) + eps)
Shapes:   z [B, W, 64*segments]; squares [B, W, segments] float32; weight [O, 64*segments];
          y [B, W, O]
Numeric:  float32 accumulation, the factor after it, one rounding; row-invariant
Effects:  writes all of y
Source:   spec "The target" (block); linear(rms_norm(out), weight) of linear_residual_scale's out
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import matmul_rows
from dflash_graph.op import Op, tensor, weight


def reference(z: Tensor, squares: Tensor, weight: Tensor, *, segments: int, eps: float) -> Tensor:
    inverse = torch.rsqrt(squares.double().sum(-1, keepdim=True) / (64 * segments) + eps)
    return (matmul_rows(z, weight, unrounded=True).double() * inverse).to(z.dtype)


OP = Op(
    name="scaled_linear",
    inputs={
        "z": tensor("B W 64*segments"),
        "squares": tensor("B W segments", "float32"),
        "weight": weight("O 64*segments"),
    },
    outputs={"y": tensor("B W O")},
    attributes={"segments": int, "eps": float},
    reference=reference,
    flops=lambda n: n.B * n.W * n.O * (128 * n.segments + 1),
)
