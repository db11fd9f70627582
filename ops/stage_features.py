"""stage_features: committed target features become pending context work.

Math:     pending[slots[b], j] = concat(features[0][b,j], features[1][b,j], ...) for j <
          committed[b]
Shapes:   features: `blocks` tensors [B, W, H], in recorded order; pending [slots, W, blocks*H];
          slots, committed [B] int32
Numeric:  exact copies
Effects:  updates those columns of pending and leaves every other byte
Raises:   ShapeError if the number of features is not `blocks`
Source:   spec "The round" (Commit), "State" (pending features)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dflash_graph.op import Op, ints, state, tensor


def reference(
    features: Sequence[Tensor], pending: Tensor, slots: Tensor, committed: Tensor, *, blocks: int
) -> None:
    hidden = features[0].shape[-1]
    for row, (slot, count) in enumerate(zip(slots.tolist(), committed.tolist(), strict=True)):
        for block, feature in enumerate(features):
            start = block * hidden
            pending[slot, :count, start : start + hidden] = feature[row, :count]


OP = Op(
    name="stage_features",
    inputs={
        "features": tensor("B W H", many="blocks"),
        "pending": state("slots W blocks*H", updates=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    attributes={"blocks": int},
    reference=reference,
    flops=lambda n: 0,
    writes={"pending": lambda n: n.B * n.W * n.blocks * n.H},
    opaque=True,
)
