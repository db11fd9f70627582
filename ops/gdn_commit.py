"""gdn_commit: moves the committed prefix of a block into the state of all GDN layers.

Math:     of every layer: S := exp(g) S + u k^T of the committed columns, on states[slots[b]], and
          conv_history_commit(columns, histories, slots, committed)
Shapes:   lists of `layers` tensors: columns [B, W, C], before the convolution; k [B, W, Hk, Dk];
          u [B, W, Hv, Dv] and g [B, W, Hv] float32, from `gdn_mixer`; states [slots, Hv, Dv, Dk]
          float32; histories [slots, depth, C], oldest first. slots, committed [B] int32
Numeric:  the updates of `gdn_mixer`, from its corrections: the state it leaves is that of
          `gdn_fold`, with the bits of the mixer's trajectory
Effects:  writes states and histories of requests with committed[b] > 0, no other byte; columns
          i >= committed[b] have no effect
Raises:   ShapeError if a list has not `layers` tensors or Hk does not divide Hv
Source:   spec "State" (Fold)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dflash_graph.delta_rule import replay
from dflash_graph.op import Argument, Op, Sizes, ints, tensor
from dflash_graph.ops import conv_history_commit


def reference(
    columns: Sequence[Tensor],
    k: Sequence[Tensor],
    u: Sequence[Tensor],
    g: Sequence[Tensor],
    states: Sequence[Tensor],
    histories: Sequence[Tensor],
    slots: Tensor,
    committed: Tensor,
    *,
    layers: int,
) -> None:
    for key, correction, decay, state in zip(k, u, g, states, strict=True):
        replay(key, correction, decay, state, slots, committed)
    for x, history in zip(columns, histories, strict=True):
        conv_history_commit.reference(x, history, slots, committed)


def _check(n: Sizes) -> str | None:
    return f"Hk = {n.Hk} must divide Hv = {n.Hv}" if n.Hv % n.Hk else None


def _states(n: Sizes) -> int:
    return n.layers * n.B * n.Hv * n.Dv * n.Dk


def _kept(n: Sizes) -> int:
    """Elements of the old histories that stay when the whole block is committed."""
    return n.layers * n.B * max(n.depth - n.W, 0) * n.C


OP = Op(
    name="gdn_commit",
    inputs={
        "columns": tensor("B W C", many="layers"),
        "k": tensor("B W Hk Dk", many="layers"),
        "u": tensor("B W Hv Dv", "float32", many="layers"),
        "g": tensor("B W Hv", "float32", many="layers"),
        "states": Argument("slots Hv Dv Dk", "float32", kind="state", updates=True, many="layers"),
        "histories": Argument("slots depth C", kind="state", updates=True, many="layers"),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    attributes={"layers": int},
    reference=reference,
    # exp(g), decay, u k^T
    flops=lambda n: n.layers * n.B * n.W * n.Hv * (1 + 3 * n.Dv * n.Dk),
    reads={
        "columns": lambda n: n.layers * n.B * min(n.depth, n.W) * n.C,
        "states": _states,
        "histories": _kept,
    },
    writes={
        "states": _states,
        "histories": lambda n: n.layers * n.B * n.depth * n.C,
    },
    check=_check,
    opaque=True,
)
