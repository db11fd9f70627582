"""conv_prepare: side 0 of the grouped dynamic convolution, and the delta of side 1 (DFlash2).

Math:     d = reshape(x projection^T, [B, W, 2 sides, 2 taps, groups])
          prepared[b,i] = (base[0,0] + d[b,i,0,0]) x[b,i]
                          + [i >= 1] (base[0,1] + d[b,i,0,1]) x[b,i-1]
          delta[b,i] = d[b,i,1]; the H/groups channels of a group share a value of d
Shapes:   x, prepared [B, W, H]; projection [4*groups, H], row (side*2 + tap)*groups + g;
          base [2 sides, 2 taps, H]; delta [B, W, 2 taps, groups]
Numeric:  float32 accumulation; d of side 0 is never rounded; one rounding at the stores of prepared
          and delta; row-invariant: column i depends on columns i and i-1 of its own request
Effects:  writes all of prepared and delta; prepared must not take the place of x
Raises:   ShapeError if groups does not divide H
Source:   spec "The drafts" (DFlash2 dynamic grouped convolution, prepare)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import matmul_rows
from dflash_graph.grouped_convolution import grouped_convolution
from dflash_graph.op import Op, tensor, weight


def reference(x: Tensor, projection: Tensor, base: Tensor, *, groups: int) -> tuple[Tensor, Tensor]:
    deltas = matmul_rows(x, projection, unrounded=True).unflatten(-1, (2, 2, groups))
    prepared = grouped_convolution(x, base[0], deltas[:, :, 0]).to(x.dtype)
    return prepared, deltas[:, :, 1].to(x.dtype).clone(memory_format=torch.contiguous_format)


OP = Op(
    name="conv_prepare",
    inputs={
        "x": tensor("B W H"),
        "projection": weight("4*groups H"),
        "base": weight("2 2 H"),
    },
    outputs={"prepared": tensor("B W H"), "delta": tensor("B W 2 groups")},
    attributes={"groups": int},
    reference=reference,
    flops=lambda n: n.B * (n.W * 8 * n.groups * n.H + (n.W + n.W - 1) * 2 * n.H + (n.W - 1) * n.H),
    reads={"base": lambda n: 2 * n.H},
    check=lambda n: None if n.H % n.groups == 0 else f"{n.groups} groups do not divide H = {n.H}",
)
