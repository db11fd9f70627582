"""ring_append: stores the keys and values of a block in cyclic state.

Math:     ring[slots[b], (start[b] + i) % window] := column i,  live[b] - window <= i < live[b]
Shapes:   k, v [B, W, G, D]; k_ring, v_ring [slots, window, G, D]; slots, start, live [B] int32
Numeric:  a copy
Effects:  writes the places of the last `window` live columns, each once, and no other byte
Source:   spec "State" (local draft layers), "The drafts" (a chunk longer than a ring)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    slots: Tensor,
    start: Tensor,
    live: Tensor,
) -> None:
    window = k_ring.shape[1]
    columns = torch.arange(k.shape[1], device=k.device)
    end = live[:, None]
    row, column = torch.nonzero((columns < end) & (columns >= end - window), as_tuple=True)
    place = (start.long()[row] + column) % window
    for ring, block in ((k_ring, k), (v_ring, v)):
        ring[slots.long()[row], place] = block[row, column]


def _stored(n: Sizes) -> int:
    return n.B * min(n.W, n.window) * n.G * n.D


OP = Op(
    name="ring_append",
    inputs={
        "k": tensor("B W G D"),
        "v": tensor("B W G D"),
        "k_ring": state("slots window G D", updates=True),
        "v_ring": state("slots window G D", updates=True),
        "slots": ints("B"),
        "start": ints("B"),
        "live": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=lambda n: 0,
    reads={"k": _stored, "v": _stored},
    writes={"k_ring": _stored, "v_ring": _stored},
    opaque=True,
)
