"""slot_hidden: the continuation hidden of each request.

Math:     hidden[b, 0] = continuation[slots[b]]
Shapes:   continuation [slots, H]; slots [B] int32; hidden [B, 1, H]
Numeric:  exact copies
Effects:  writes all of hidden
Source:   spec "The round" (Commit: the continuation hidden)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, ints, state, tensor


def reference(continuation: Tensor, slots: Tensor) -> Tensor:
    return continuation[slots.long()].unsqueeze(1)


OP = Op(
    name="slot_hidden",
    inputs={"continuation": state("slots H"), "slots": ints("B")},
    outputs={"hidden": tensor("B 1 H")},
    reference=reference,
    flops=lambda n: 0,
    reads={"continuation": lambda n: n.B * n.H},
)
