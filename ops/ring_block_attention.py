"""ring_block_attention: a draft block over its context ring and itself (local draft layers).

Math:     o[b,i,h] = softmax_j(q[b,i,h] . k_j / sqrt(D)) v_j over the keys at positions p_j with
          |p_j - (F+i)| < window, and p_j <= F+i if causal; keys are context positions
          [max(0, F-window), F) from the ring (slot p % window) and block columns F..F+live-1 from
          k, v; head h reads kv head h // (N/G)
Shapes:   q [B, W, N, D]; k, v [B, W, G, D]; k_ring, v_ring [slots, window, G, D];
          slots, frontier F, live [B] int32; o [B, W, N*D]
Numeric:  float64, one rounding at the store; a request's bits depend on neither B, its row, the
          other rows nor dead columns. Without causality its result depends on `live` by definition
Effects:  writes all of o, zeros in columns >= live; what a ring holds outside [max(0, F-window), F)
          has no effect
Source:   spec "The drafts" (Block), "State" (rings)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.block_attention import DEAD, Keys, block_attention
from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    slots: Tensor,
    frontier: Tensor,
    live: Tensor,
    *,
    causal: bool,
) -> Tensor:
    window = k_ring.shape[1]
    rows = slots.long()
    # Slot s holds the last position before the frontier that is congruent to s.
    last = frontier.long().unsqueeze(1) - 1
    positions = last - (last - torch.arange(window, device=q.device)) % window
    positions = torch.where(positions >= 0, positions, DEAD)
    context = Keys(k_ring[rows], v_ring[rows], positions)
    return block_attention(q, k, v, (context,), frontier, live, causal=causal, window=window)


def _pairs(n: Sizes) -> int:
    """Visible (query, key) pairs of a request whose columns are all live."""
    total = 0
    for column in range(n.W):
        context = max(0, min(n.context, n.window - 1 - column))
        before = min(column, n.window - 1)
        after = 0 if n.causal else min(n.W - 1 - column, n.window - 1)
        total += context + before + 1 + after
    return total


def _ring_elements(n: Sizes) -> int:
    """The position `F - window` is stored and seen by no column."""
    return n.B * min(n.context, n.window - 1) * n.G * n.D


OP = Op(
    name="ring_block_attention",
    inputs={
        "q": tensor("B W N D"),
        "k": tensor("B W G D"),
        "v": tensor("B W G D"),
        "k_ring": state("slots window G D"),
        "v_ring": state("slots window G D"),
        "slots": ints("B"),
        "frontier": ints("B"),
        "live": ints("B"),
    },
    outputs={"o": tensor("B W N*D")},
    attributes={"causal": bool},
    reference=reference,
    flops=lambda n: 4 * n.B * n.N * n.D * _pairs(n),
    reads={"k_ring": _ring_elements, "v_ring": _ring_elements},
    check=lambda n: None if n.N % n.G == 0 else f"{n.N} q heads do not divide among {n.G} kv heads",
    opaque=True,
)
