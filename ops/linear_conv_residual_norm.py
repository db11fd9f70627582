"""linear_conv_residual_norm: a DFlash2 branch's last product, the output side of its convolution,
the sum with the residual stream, the next norm.

Math:     out = residual_add(x, conv_finish(linear(y, weight), base, delta));  n = rms_norm(out,
          norm)
Shapes:   y [B, W, I]; weight [O, I]; base [2 sides, 2 taps, O]; delta [B, W, 2 taps, groups];
          x, out, n [B, W, O]; norm [O]
Numeric:  as the four ops: product, convolution and sum are each rounded to the model dtype;
          row-invariant
Effects:  writes all of out and n; out may take the place of x
Raises:   ShapeError if groups does not divide O
Source:   spec "The drafts" (block, DFlash2 dynamic grouped convolution)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, tensor, weight
from dflash_graph.ops import conv_finish, linear, residual_add, rms_norm


def reference(
    y: Tensor,
    weight: Tensor,
    base: Tensor,
    delta: Tensor,
    x: Tensor,
    norm: Tensor,
    *,
    groups: int,
    eps: float,
    offset: bool,
) -> tuple[Tensor, Tensor]:
    branch = linear.reference(y, weight, tiled=True)
    branch = conv_finish.reference(branch, base, delta, groups=groups)
    out = residual_add.reference(x, branch)
    return out, rms_norm.reference(out, norm, eps=eps, offset=offset)


OP = Op(
    name="linear_conv_residual_norm",
    inputs={
        "y": tensor("B W I"),
        "weight": weight("O I"),
        "base": weight("2 2 O"),
        "delta": tensor("B W 2 groups"),
        "x": tensor("B W O"),
        "norm": weight("O"),
    },
    outputs={"out": tensor("B W O"), "n": tensor("B W O")},
    attributes={"groups": int, "eps": float, "offset": bool},
    reference=reference,
    flops=lambda n: n.B * n.O * (n.W * (2 * n.I + 5) + (n.W + n.W - 1) * 2 + n.W - 1),
    reads={"base": lambda n: 2 * n.O},
    check=lambda n: None if n.O % n.groups == 0 else f"{n.groups} groups do not divide O = {n.O}",
    in_place={"out": "x"},
)
