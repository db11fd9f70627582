"""pending_features: the features that a request's next context catch-up works on.

Math:     features[b] = pending[slots[b]]
Shapes:   pending [slots, W, width]; slots [B] int32; features [B, W, width]
Numeric:  exact copies; columns that were never staged hold what the state holds
Effects:  writes all of features
Source:   spec "The round" (Materialize)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, ints, state, tensor


def reference(pending: Tensor, slots: Tensor) -> Tensor:
    return pending[slots.long()]


OP = Op(
    name="pending_features",
    inputs={"pending": state("slots W width"), "slots": ints("B")},
    outputs={"features": tensor("B W width")},
    reference=reference,
    flops=lambda n: 0,
    reads={"pending": lambda n: n.B * n.W * n.width},
)
