"""count_tokens: committed tokens enter the counts that penalties look at.

Math:     counts[slots[b], v] += #{j < committed[b]: outputs[b,j] = v}
Shapes:   outputs [B, W] int32; counts [slots, V] int32; slots, committed [B] int32
Numeric:  exact
Effects:  updates those counts and leaves every other byte; what stands in outputs at or after
          committed has no effect
Source:   spec "The round" (Commit), "Sampling and verification" (penalties)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, ints, state


def reference(outputs: Tensor, counts: Tensor, slots: Tensor, committed: Tensor) -> None:
    column = torch.arange(outputs.shape[1], device=outputs.device)
    row, place = (column < committed.unsqueeze(1)).nonzero().unbind(1)
    one = torch.ones_like(row, dtype=counts.dtype)
    counts.index_put_((slots[row].long(), outputs[row, place].long()), one, accumulate=True)


OP = Op(
    name="count_tokens",
    inputs={
        "outputs": ints("B W"),
        "counts": state("slots V", "int32", updates=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=lambda n: 0,
    reads={"counts": lambda n: n.B * n.W},
    writes={"counts": lambda n: n.B * n.W},
    opaque=True,
)
