"""conv_history_commit: moves the committed prefix of a block into a convolution's history.

Math:     history[slots[b]] := last `depth` of [history[slots[b]] | columns[b, :committed[b]]]
Shapes:   columns [B, W, C], before the convolution; history [slots, depth, C], oldest first;
          slots, committed [B] int32
Numeric:  a copy
Effects:  writes the history of requests with committed[b] > 0, no other byte; columns
          i >= committed[b] have no effect
Source:   spec "The target" (Gated DeltaNet), "State" (Fold)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(columns: Tensor, history: Tensor, slots: Tensor, committed: Tensor) -> None:
    depth = history.shape[1]
    row = torch.nonzero(committed > 0)[:, 0]
    place = slots.long()[row]
    stream = torch.cat((history[place], columns[row]), dim=1)  # [rows, depth + W, C]
    kept = committed.long()[row, None] + torch.arange(depth, device=columns.device)
    history[place] = stream[torch.arange(len(row), device=columns.device)[:, None], kept]


def _kept(n: Sizes) -> int:
    """Elements of the old history that stay when the whole block is committed."""
    return n.B * max(n.depth - n.W, 0) * n.C


OP = Op(
    name="conv_history_commit",
    inputs={
        "columns": tensor("B W C"),
        "history": state("slots depth C", updates=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=lambda n: 0,
    reads={"columns": lambda n: n.B * min(n.depth, n.W) * n.C, "history": _kept},
    writes={"history": lambda n: n.B * n.depth * n.C},
    opaque=True,
)
