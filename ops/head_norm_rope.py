"""head_norm_rope: splits a QKV projection into heads; norm and rotary positions on q and k.

Math:     [q | k | v] = qkv;  per head  n = s * x / sqrt(mean(x^2) + eps),  s = 1 + w (offset) or w
          y[c]               = n[c] * cos[c] - n[c + rotary_half] * sin[c]
          y[c + rotary_half] = n[c + rotary_half] * cos[c] + n[c] * sin[c]   for c < rotary_half
          y[c]               = n[c]   for c >= 2 * rotary_half
Shapes:   qkv [B, W, query_parts*q_heads*head_dim + 2*kv_heads*head_dim]; q_norm, k_norm [head_dim];
          cos, sin [B, W, rotary_half] float32; q [B, W, q_heads, head_dim];
          k, v [B, W, kv_heads, head_dim].
          With query_parts 2 a query head is [query | gate]; the gate is left to `attention_gate`
Numeric:  unrounded from the projection to the rotated head, one rounding; row-invariant
Effects:  writes all of q, k and v; v is a copy
Raises:   ShapeError if query_parts is not 1 or 2, or the rotary part is wider than a head
Source:   spec "The target" (gated full attention), "The drafts" (block)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import mean_square_scale, rotate
from dflash_graph.op import Op, Sizes, tensor, weight


def reference(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query_parts: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
    offset: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, columns, _ = qkv.shape
    kv_width = kv_heads * head_dim
    q, k, v = qkv.split((query_parts * q_heads * head_dim, kv_width, kv_width), dim=-1)
    q = q.reshape(batch, columns, q_heads, query_parts * head_dim)[..., :head_dim]
    k = k.reshape(batch, columns, kv_heads, head_dim)

    def normed_and_turned(x: Tensor, norm: Tensor) -> Tensor:
        scale = norm.double() + 1.0 if offset else norm.double()
        return rotate(x.double() * mean_square_scale(x, eps) * scale, cos, sin).to(x.dtype)

    v = v.clone(memory_format=torch.contiguous_format)
    return (
        normed_and_turned(q, q_norm),
        normed_and_turned(k, k_norm),
        v.view(batch, columns, kv_heads, head_dim),
    )


def _check(n: Sizes) -> str | None:
    if n.query_parts not in (1, 2):
        return f"query_parts must be 1 (query) or 2 (query and gate), got {n.query_parts}"
    if 2 * n.rotary_half > n.head_dim:
        return f"the rotary part 2 * {n.rotary_half} is wider than head_dim = {n.head_dim}"
    return None


OP = Op(
    name="head_norm_rope",
    inputs={
        "qkv": tensor("B W query_parts*q_heads*head_dim+2*kv_heads*head_dim"),
        "q_norm": weight("head_dim"),
        "k_norm": weight("head_dim"),
        "cos": tensor("B W rotary_half", "float32"),
        "sin": tensor("B W rotary_half", "float32"),
    },
    outputs={
        "q": tensor("B W q_heads head_dim"),
        "k": tensor("B W kv_heads head_dim"),
        "v": tensor("B W kv_heads head_dim"),
    },
    attributes={
        "query_parts": int,
        "q_heads": int,
        "kv_heads": int,
        "head_dim": int,
        "rotary_half": int,
        "eps": float,
        "offset": bool,
    },
    reference=reference,
    flops=lambda n: n.B * n.W * (n.q_heads + n.kv_heads) * (4 * n.head_dim + 6 * n.rotary_half),
    reads={"qkv": lambda n: n.B * n.W * (n.q_heads + 2 * n.kv_heads) * n.head_dim},
    check=_check,
)
