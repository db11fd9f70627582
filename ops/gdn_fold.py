"""gdn_fold: advances the state by the committed prefix of a block's records.

Math:     state[slots[b]] := S after column committed[b] - 1 of `gdn_recurrence`
Shapes:   k [B, W, Hk, Dk]; v [B, W, Hv, Dv]; beta, g [B, W, Hv] float32;
          state [slots, Hv, Dv, Dk] float32; slots, committed [B] int32
Numeric:  the arithmetic of `gdn_recurrence`: the folded state has the bits of its trajectory
Effects:  writes the state of requests with committed[b] > 0, no other byte; columns
          i >= committed[b] have no effect
Raises:   ShapeError if Hk does not divide Hv
Source:   spec "State" (Fold)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.delta_rule import column_flops, delta_rule
from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    slots: Tensor,
    committed: Tensor,
) -> None:
    delta_rule(k, v, beta, g, state, slots, committed, store=True)


def _check(n: Sizes) -> str | None:
    return f"Hk = {n.Hk} must divide Hv = {n.Hv}" if n.Hv % n.Hk else None


def _flops(n: Sizes) -> int:
    return n.B * n.W * column_flops(n.Hk, n.Hv, n.Dk, n.Dv, outputs=False)


def _states(n: Sizes) -> int:
    return n.B * n.Hv * n.Dv * n.Dk


OP = Op(
    name="gdn_fold",
    inputs={
        "k": tensor("B W Hk Dk"),
        "v": tensor("B W Hv Dv"),
        "beta": tensor("B W Hv", "float32"),
        "g": tensor("B W Hv", "float32"),
        "state": state("slots Hv Dv Dk", "float32", updates=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=_flops,
    reads={"state": _states},
    writes={"state": _states},
    check=_check,
    opaque=True,
)
