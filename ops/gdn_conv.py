"""gdn_conv: causal depthwise convolution and SiLU over a GDN projection, split into heads.

Math:     c[b,i] = sum_t weight[:,t] * X[b,i+t],  X = [history[slots[b]] | x[b]];
          [q | k | v][b,i] = silu(c[b,i])
Shapes:   x [B, W, C]; weight [C, taps], the last tap is the current column;
          history [slots, taps-1, C], oldest first; slots [B] int32;
          q, k [B, W, key_heads, key_dim]; v [B, W, value_heads, value_dim];
          C = 2*key_heads*key_dim + value_heads*value_dim
Numeric:  taps added oldest first, evaluated unrounded, one rounding at the store; row-invariant
Effects:  writes all of q, k and v; history is read only
Raises:   ShapeError if C is not the width of the heads
Source:   spec "The target" (Gated DeltaNet)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import silu
from dflash_graph.op import Op, Sizes, ints, state, tensor, weight


def reference(
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    slots: Tensor,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, columns, _ = x.shape
    stream = torch.cat((history[slots.long()], x), dim=1).double()  # [B, taps-1 + W, C]
    taps = weight.double().unbind(1)
    total = stream[:, :columns] * taps[0]
    for index in range(1, len(taps)):
        total = total + stream[:, index : index + columns] * taps[index]
    keys, values = key_heads * key_dim, value_heads * value_dim
    parts = silu(total).to(x.dtype).split((keys, keys, values), dim=-1)
    # Cloned: a split is a view of all three.
    q, k, v = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return (
        q.view(batch, columns, key_heads, key_dim),
        k.view(batch, columns, key_heads, key_dim),
        v.view(batch, columns, value_heads, value_dim),
    )


def _check(n: Sizes) -> str | None:
    width = 2 * n.key_heads * n.key_dim + n.value_heads * n.value_dim
    if width != n.C:
        return f"C must be 2*key_heads*key_dim + value_heads*value_dim = {width}, got {n.C}"
    return None


OP = Op(
    name="gdn_conv",
    inputs={
        "x": tensor("B W C"),
        "weight": weight("C taps"),
        "history": state("slots taps-1 C"),
        "slots": ints("B"),
    },
    outputs={
        "q": tensor("B W key_heads key_dim"),
        "k": tensor("B W key_heads key_dim"),
        "v": tensor("B W value_heads value_dim"),
    },
    attributes={"key_heads": int, "key_dim": int, "value_heads": int, "value_dim": int},
    reference=reference,
    flops=lambda n: n.B * n.W * n.C * (2 * n.taps - 1 + 3),
    reads={"history": lambda n: n.B * (n.taps - 1) * n.C},
    check=_check,
)
