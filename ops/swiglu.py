"""swiglu: gated activation of a feed-forward network.

Math:     y = silu(gate) * up,  [gate | up] = gate_up,  silu(x) = x / (1 + exp(-x))
Shapes:   gate_up [B, W, 2*ffn_width]; y [B, W, ffn_width]
Numeric:  evaluated unrounded, one rounding at the store; row-invariant
Effects:  writes all of y
Source:   spec "The drafts" (block), "The target" (MoE, per expert)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import silu
from dflash_graph.op import Op, tensor


def reference(gate_up: Tensor, *, ffn_width: int) -> Tensor:
    gate, up = gate_up.split(ffn_width, dim=-1)
    return (silu(gate) * up.double()).to(gate_up.dtype)


OP = Op(
    name="swiglu",
    inputs={"gate_up": tensor("B W 2*ffn_width")},
    outputs={"y": tensor("B W ffn_width")},
    attributes={"ffn_width": int},
    reference=reference,
    flops=lambda n: 4 * n.B * n.W * n.ffn_width,
)
