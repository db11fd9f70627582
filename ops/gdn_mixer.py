"""gdn_mixer: what a GDN layer does between its projections, as one op, without changing state.

Math:     q, k, v = gdn_conv(x, taps_weight, history, slots);  beta, g = gdn_gates(ba, ...);
          y = gdn_recurrence(q, k, v, beta, g, state, slots, live);  out = gated_norm(y, z, norm)
          u: the recurrence's corrections, u = beta / |k| (v - S k / |k|) on the decayed state
Shapes:   x [B, W, C]; taps_weight [C, taps]; history [slots, taps-1, C]; ba [B, W, 2*value_heads];
          a_log, dt_bias [value_heads] float32; z, out [B, W, value_heads*value_dim];
          norm [value_dim]; state [slots, value_heads, value_dim, key_dim] float32;
          slots, live [B] int32; k [B, W, key_heads, key_dim]; u [B, W, value_heads, value_dim]
          float32; g [B, W, value_heads] float32; C = 2*key_heads*key_dim + value_heads*value_dim
Numeric:  of the four ops; q, k and v are rounded between convolution and recurrence;
          row-invariant
Effects:  writes all of out, k, u and g; out and u are zero in columns i >= live[b], which have no
          effect on others; history and state are read only. k, u and g are what `gdn_commit`
          replays: u stands for the records v and beta, of which a fold needs nothing else
Raises:   ShapeError if C is not the width of the heads or key_heads does not divide value_heads
Source:   spec "The target" (Gated DeltaNet), "State" (records)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.delta_rule import column_flops, delta_rule
from dflash_graph.op import Op, Sizes, ints, state, tensor, weight
from dflash_graph.ops import gated_norm, gdn_conv, gdn_gates


def reference(
    x: Tensor,
    taps_weight: Tensor,
    history: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    z: Tensor,
    norm: Tensor,
    state: Tensor,
    slots: Tensor,
    live: Tensor,
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = gdn_conv.reference(
        x,
        taps_weight,
        history,
        slots,
        key_heads=key_heads,
        key_dim=key_dim,
        value_heads=value_heads,
        value_dim=value_dim,
    )
    beta, g = gdn_gates.reference(ba, a_log, dt_bias, value_heads=value_heads)
    u = state.new_empty(v.shape)
    y = delta_rule(k, v, beta, g, state, slots, live, q=q, store=False, corrections=u)
    assert y is not None, "queries were given"
    out = gated_norm.reference(y, z, norm, value_heads=value_heads, value_dim=value_dim, eps=eps)
    return out, k, u, g


def _check(n: Sizes) -> str | None:
    width = 2 * n.key_heads * n.key_dim + n.value_heads * n.value_dim
    if width != n.C:
        return f"C must be 2*key_heads*key_dim + value_heads*value_dim = {width}, got {n.C}"
    if n.value_heads % n.key_heads:
        return f"key_heads = {n.key_heads} must divide value_heads = {n.value_heads}"
    return None


def _flops(n: Sizes) -> int:
    """Of the four ops."""
    rule = column_flops(n.key_heads, n.value_heads, n.key_dim, n.value_dim, outputs=True)
    column = n.C * (2 * n.taps - 1 + 3) + n.value_heads * (8 + 8 * n.value_dim) + rule
    return n.B * n.W * column + n.value_heads


OP = Op(
    name="gdn_mixer",
    inputs={
        "x": tensor("B W C"),
        "taps_weight": weight("C taps"),
        "history": state("slots taps-1 C"),
        "ba": tensor("B W 2*value_heads"),
        "a_log": weight("value_heads", "float32"),
        "dt_bias": weight("value_heads", "float32"),
        "z": tensor("B W value_heads*value_dim"),
        "norm": weight("value_dim"),
        "state": state("slots value_heads value_dim key_dim", "float32"),
        "slots": ints("B"),
        "live": ints("B"),
    },
    outputs={
        "out": tensor("B W value_heads*value_dim"),
        "k": tensor("B W key_heads key_dim"),
        "u": tensor("B W value_heads value_dim", "float32"),
        "g": tensor("B W value_heads", "float32"),
    },
    attributes={
        "key_heads": int,
        "key_dim": int,
        "value_heads": int,
        "value_dim": int,
        "eps": float,
    },
    reference=reference,
    flops=_flops,
    reads={
        "history": lambda n: n.B * (n.taps - 1) * n.C,
        "state": lambda n: n.B * n.value_heads * n.value_dim * n.key_dim,
    },
    check=_check,
    opaque=True,
)
