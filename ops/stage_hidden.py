"""stage_hidden: the hidden of the last committed column becomes the continuation hidden.

Math:     continuation[slots[b]] = hidden[b, committed[b] - 1] where committed[b] > 0
Shapes:   hidden [B, W, H]; continuation [slots, H]; slots, committed [B] int32
Numeric:  exact copies
Effects:  updates those slots of continuation and leaves every other byte
Source:   spec "The round" (Commit)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, ints, state, tensor


def reference(hidden: Tensor, continuation: Tensor, slots: Tensor, committed: Tensor) -> None:
    rows = (committed > 0).nonzero().squeeze(1)
    continuation[slots[rows].long()] = hidden[rows, committed[rows].long() - 1]


OP = Op(
    name="stage_hidden",
    inputs={
        "hidden": tensor("B W H"),
        "continuation": state("slots H", updates=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=lambda n: 0,
    reads={"hidden": lambda n: n.B * n.H},
    writes={"continuation": lambda n: n.B * n.H},
    opaque=True,
)
