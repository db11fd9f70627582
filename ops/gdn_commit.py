"""gdn_commit: moves the committed prefix of a block into the state of all GDN layers.

Math:     of every layer: gdn_fold(k, v, beta, g, states, slots, committed) and
          conv_history_commit(columns, histories, slots, committed)
Shapes:   lists of `layers` tensors: columns [B, W, C], before the convolution; k [B, W, Hk, Dk];
          v [B, W, Hv, Dv]; beta, g [B, W, Hv] float32; states [slots, Hv, Dv, Dk] float32;
          histories [slots, depth, C], oldest first. slots, committed [B] int32
Numeric:  the arithmetic of `gdn_mixer`: the folded state has the bits of its trajectory
Effects:  writes states and histories of requests with committed[b] > 0, no other byte; columns
          i >= committed[b] have no effect
Raises:   ShapeError if a list has not `layers` tensors or Hk does not divide Hv
Source:   spec "State" (Fold)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dflash_graph.delta_rule import column_flops
from dflash_graph.errors import ShapeError
from dflash_graph.op import Argument, Op, Sizes, ints, tensor
from dflash_graph.ops import conv_history_commit, gdn_fold


def reference(
    columns: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    beta: Sequence[Tensor],
    g: Sequence[Tensor],
    states: Sequence[Tensor],
    histories: Sequence[Tensor],
    slots: Tensor,
    committed: Tensor,
    *,
    layers: int,
) -> None:
    lists = (columns, k, v, beta, g, states, histories)
    for name, tensors in zip(OP.inputs, lists, strict=False):
        if len(tensors) != layers:
            raise ShapeError(f"gdn_commit.{name}: expected {layers} tensors, got {len(tensors)}")
    for key, value, strength, decay, state in zip(k, v, beta, g, states, strict=True):
        gdn_fold.reference(key, value, strength, decay, state, slots, committed)
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
        "columns": tensor("B W C", many=True),
        "k": tensor("B W Hk Dk", many=True),
        "v": tensor("B W Hv Dv", many=True),
        "beta": tensor("B W Hv", "float32", many=True),
        "g": tensor("B W Hv", "float32", many=True),
        "states": Argument("slots Hv Dv Dk", "float32", kind="state", updates=True, many=True),
        "histories": Argument("slots depth C", kind="state", updates=True, many=True),
        "slots": ints("B"),
        "committed": ints("B"),
    },
    outputs={},
    attributes={"layers": int},
    reference=reference,
    flops=lambda n: n.layers * n.B * n.W * column_flops(n.Hk, n.Hv, n.Dk, n.Dv, outputs=False),
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
