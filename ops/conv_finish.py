"""conv_finish: side 1 of the grouped dynamic convolution, on the branch output (DFlash2).

Math:     out[b,i] = (base[1,0] + delta[b,i,0]) y[b,i]
                   + [i >= 1] (base[1,1] + delta[b,i,1]) y[b,i-1];
          the H/groups channels of a group share a value of delta
Shapes:   y, out [B, W, H]; base [2 sides, 2 taps, H]; delta [B, W, 2 taps, groups], as conv_prepare
          made it
Numeric:  evaluated unrounded, one rounding at the store; row-invariant: column i depends on columns
          i and i-1 of its own request
Effects:  writes all of out; out must not take the place of y
Raises:   ShapeError if groups does not divide H
Source:   spec "The drafts" (DFlash2 dynamic grouped convolution, finish)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.grouped_convolution import grouped_convolution
from dflash_graph.op import Op, tensor, weight


def reference(y: Tensor, base: Tensor, delta: Tensor, *, groups: int) -> Tensor:
    return grouped_convolution(y, base[1], delta).to(y.dtype)


OP = Op(
    name="conv_finish",
    inputs={
        "y": tensor("B W H"),
        "base": weight("2 2 H"),
        "delta": tensor("B W 2 groups"),
    },
    outputs={"out": tensor("B W H")},
    attributes={"groups": int},
    reference=reference,
    flops=lambda n: n.B * ((n.W + n.W - 1) * 2 * n.H + (n.W - 1) * n.H),
    reads={"base": lambda n: 2 * n.H},
    check=lambda n: None if n.H % n.groups == 0 else f"{n.groups} groups do not divide H = {n.H}",
)
