"""context_kv: keys and values of a draft layer for context columns.

Math:     [y_k | y_v] = c weight^T;  v = y_v
          k = rope(k_norm * y_k / sqrt(mean(y_k^2) + eps)) per head;
          rope is split-half over the first 2*rotary_half channels
Shapes:   c [B, W, H]; weight [2*kv_heads*head_dim, H], the k rows and then the v rows; k_norm
          [head_dim]; cos, sin [B, W, rotary_half] float32; k, v [B, W, kv_heads, head_dim]
Numeric:  float32 accumulation, no rounding between projection, norm and rope; one at the store of k
          and of v; row-invariant if `tiled`
Effects:  writes all of k and v
Raises:   ShapeError if the rotary part is wider than a head
Source:   spec "The drafts" (Context): no observable cast between the key projection and its head
          norm
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import matmul_rows, mean_square_scale, rotate
from dflash_graph.op import Op, Sizes, tensor, weight


def reference(
    c: Tensor,
    weight: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
    tiled: bool,
) -> tuple[Tensor, Tensor]:
    projected = matmul_rows(c, weight, tiled=tiled, unrounded=True)
    k, v = projected.unflatten(-1, (2, kv_heads, head_dim)).unbind(-3)  # [B, W, kv_heads, head_dim]
    k = k.double() * mean_square_scale(k, eps) * k_norm.double()
    return rotate(k, cos, sin).to(c.dtype), v.to(
        c.dtype, copy=True, memory_format=torch.contiguous_format
    )


def _check(n: Sizes) -> str | None:
    if 2 * n.rotary_half > n.head_dim:
        return f"the rotary part of 2*{n.rotary_half} channels is wider than a head of {n.head_dim}"
    return None


OP = Op(
    name="context_kv",
    inputs={
        "c": tensor("B W H"),
        "weight": weight("2*kv_heads*head_dim H"),
        "k_norm": weight("head_dim"),
        "cos": tensor("B W rotary_half", "float32"),
        "sin": tensor("B W rotary_half", "float32"),
    },
    outputs={"k": tensor("B W kv_heads head_dim"), "v": tensor("B W kv_heads head_dim")},
    attributes={
        "kv_heads": int,
        "head_dim": int,
        "rotary_half": int,
        "eps": float,
        "tiled": bool,
    },
    reference=reference,
    flops=lambda n: (
        n.B * n.W * n.kv_heads * (4 * n.head_dim * n.H + 4 * n.head_dim + 6 * n.rotary_half)
    ),
    check=_check,
)
