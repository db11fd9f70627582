"""linear_residual_scale: a branch's last product, its sum with the residual stream, the next norm's
weight.

Math:     out = residual_add(x, linear(y, weight));  z = out * s,  s = 1 + norm (offset) or norm;
          squares[t] = the sum of out^2 over channels 64 t .. 64 t + 63
Shapes:   y [B, W, I]; weight [64*segments, I]; x, out, z [B, W, 64*segments]; norm [64*segments];
          squares [B, W, segments] float32
Numeric:  the product, the sum and z are each rounded to the model dtype; row-invariant
Effects:  writes all of out, z and squares; out may take the place of x
Source:   spec "The target" (block); rms_norm(out) = z / sqrt(mean(out^2) + eps): the product that
          follows takes the factor of a row (scaled_linear)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import accumulator
from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import linear, residual_add


def reference(
    y: Tensor, weight: Tensor, x: Tensor, norm: Tensor, *, segments: int, offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = residual_add.reference(x, linear.reference(y, weight, tiled=True))
    scale = norm.double() + 1.0 if offset else norm.double()
    squares = out.double().square().unflatten(-1, (segments, 64)).sum(-1)
    return out, (out.double() * scale).to(x.dtype), squares.to(accumulator(x))


OP = Op(
    name="linear_residual_scale",
    inputs={
        "y": tensor("B W I"),
        "weight": weight("64*segments I"),
        "x": tensor("B W 64*segments"),
        "norm": weight("64*segments"),
    },
    outputs={
        "out": tensor("B W 64*segments"),
        "z": tensor("B W 64*segments"),
        "squares": tensor("B W segments", "float32"),
    },
    attributes={"segments": int, "offset": bool},
    reference=reference,
    flops=lambda n: n.B * n.W * 64 * n.segments * (2 * n.I + 4),
    in_place={"out": "x"},
)
