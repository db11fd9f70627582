"""gdn_scan: the gated delta rule over a block, leaving the state after it (prefill).

Math:     as `gdn_recurrence`, then state[slots[b]] := S after column live[b] - 1
Shapes:   q, k [B, W, Hk, Dk]; v [B, W, Hv, Dv]; beta, g [B, W, Hv] float32;
          state [slots, Hv, Dv, Dk] float32; slots, live [B] int32; y [B, W, Hv, Dv] float32
Numeric:  the bits of `gdn_recurrence` and `gdn_fold`, wherever a prompt is cut into blocks
Effects:  writes all of y, zeros in columns i >= live[b], whose inputs have no effect; writes
          the state of requests with live[b] > 0, no other byte
Raises:   ShapeError if Hk does not divide Hv
Source:   spec "The target" (Gated DeltaNet)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.delta_rule import column_flops, delta_rule
from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    slots: Tensor,
    live: Tensor,
) -> Tensor:
    y = delta_rule(k, v, beta, g, state, slots, live, q=q, store=True)
    assert y is not None, "queries were given"
    return y


def _check(n: Sizes) -> str | None:
    return f"Hk = {n.Hk} must divide Hv = {n.Hv}" if n.Hv % n.Hk else None


def _flops(n: Sizes) -> int:
    return n.B * n.W * column_flops(n.Hk, n.Hv, n.Dk, n.Dv, outputs=True)


def _states(n: Sizes) -> int:
    return n.B * n.Hv * n.Dv * n.Dk


OP = Op(
    name="gdn_scan",
    inputs={
        "q": tensor("B W Hk Dk"),
        "k": tensor("B W Hk Dk"),
        "v": tensor("B W Hv Dv"),
        "beta": tensor("B W Hv", "float32"),
        "g": tensor("B W Hv", "float32"),
        "state": state("slots Hv Dv Dk", "float32", updates=True),
        "slots": ints("B"),
        "live": ints("B"),
    },
    outputs={"y": tensor("B W Hv Dv", "float32")},
    reference=reference,
    flops=_flops,
    reads={"state": _states},
    writes={"state": _states},
    check=_check,
    opaque=True,
)
