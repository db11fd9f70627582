"""gated_norm: the output norm of a GDN layer, per value head, with its gate.

Math:     out[h] = w * y[h] / sqrt(mean(y[h]^2) + eps) * silu(z[h])
Shapes:   y [B, W, value_heads, value_dim] float32; z, out [B, W, value_heads*value_dim];
          weight [value_dim]
Numeric:  evaluated unrounded, one rounding at the store; row-invariant
Effects:  writes all of out
Source:   spec "The target" (Gated DeltaNet; plain weight)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import mean_square_scale, silu
from dflash_graph.op import Op, tensor, weight


def reference(
    y: Tensor, z: Tensor, weight: Tensor, *, value_heads: int, value_dim: int, eps: float
) -> Tensor:
    normed = y.double() * mean_square_scale(y, eps) * weight.double()
    return (normed.flatten(-2) * silu(z)).to(z.dtype)


OP = Op(
    name="gated_norm",
    inputs={
        "y": tensor("B W value_heads value_dim", "float32"),
        "z": tensor("B W value_heads*value_dim"),
        "weight": weight("value_dim"),
    },
    outputs={"out": tensor("B W value_heads*value_dim")},
    attributes={"value_heads": int, "value_dim": int, "eps": float},
    reference=reference,
    flops=lambda n: 8 * n.B * n.W * n.value_heads * n.value_dim,
)
