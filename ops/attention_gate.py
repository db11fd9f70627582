"""attention_gate: the output gate of full attention, read from the QKV projection.

Math:     y[b,i,h] = o[b,i,h] * sigmoid(gate[b,i,h]),  qkv = [per head (query | gate) | k | v]
Shapes:   o, y [B, W, q_heads*head_dim]; qkv [B, W, 2*q_heads*head_dim + 2*kv_heads*head_dim]
Numeric:  evaluated unrounded, one rounding at the store; row-invariant
Effects:  writes all of y; may take the place of o
Source:   spec "The target" (gated full attention)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.arithmetic import sigmoid
from dflash_graph.op import Op, tensor


def reference(o: Tensor, qkv: Tensor, *, q_heads: int, kv_heads: int, head_dim: int) -> Tensor:
    queries = qkv[..., : 2 * q_heads * head_dim]
    gate = queries.unflatten(-1, (q_heads, 2, head_dim))[..., 1, :].flatten(-2)  # [B, W, N*D]
    return (o.double() * sigmoid(gate)).to(o.dtype)


OP = Op(
    name="attention_gate",
    inputs={
        "o": tensor("B W q_heads*head_dim"),
        "qkv": tensor("B W 2*q_heads*head_dim+2*kv_heads*head_dim"),
    },
    outputs={"y": tensor("B W q_heads*head_dim")},
    attributes={"q_heads": int, "kv_heads": int, "head_dim": int},
    reference=reference,
    flops=lambda n: 4 * n.B * n.W * n.q_heads * n.head_dim,
    reads={"qkv": lambda n: n.B * n.W * n.q_heads * n.head_dim},
    in_place={"y": "o"},
)
