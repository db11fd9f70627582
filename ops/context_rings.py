"""context_rings: context columns become keys and values of every local draft layer, in its ring.

Math:     for every layer: k, v = context_kv(c, weights[l], k_norms[l], cos, sin), then ring_append
          into k_rings[l], v_rings[l]
Shapes:   c [B, W, H]; `layers` each of weights [2*kv_heads*head_dim, H], k_norms [head_dim] and
          k_rings, v_rings [slots, window, kv_heads, head_dim]; cos, sin [B, W, rotary_half]
          float32; slots, start, live [B] int32
Numeric:  as context_kv; row-invariant
Effects:  writes the places of the last `window` live columns of each ring, and no other byte
Raises:   ShapeError if a list does not have `layers` entries, or the rotary part is wider than a
          head
Source:   spec "The drafts" (Context), "State" (rings)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dflash_graph.op import Argument, Op, Sizes, ints, tensor
from dflash_graph.ops import context_kv, ring_append


def reference(
    c: Tensor,
    weights: Sequence[Tensor],
    k_norms: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    k_rings: Sequence[Tensor],
    v_rings: Sequence[Tensor],
    slots: Tensor,
    start: Tensor,
    live: Tensor,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
) -> None:
    heads = {"kv_heads": kv_heads, "head_dim": head_dim, "rotary_half": rotary_half}
    for weight, norm, k_ring, v_ring in zip(weights, k_norms, k_rings, v_rings, strict=True):
        k, v = context_kv.reference(c, weight, norm, cos, sin, eps=eps, tiled=True, **heads)
        ring_append.reference(k, v, k_ring, v_ring, slots, start, live)


def _stored(n: Sizes) -> int:
    return n.layers * n.B * min(n.W, n.window) * n.kv_heads * n.head_dim


def _many_rings() -> Argument:
    return Argument("slots window kv_heads head_dim", kind="state", updates=True, many="layers")


OP = Op(
    name="context_rings",
    inputs={
        "c": tensor("B W H"),
        "weights": Argument("2*kv_heads*head_dim H", kind="weight", many="layers"),
        "k_norms": Argument("head_dim", kind="weight", many="layers"),
        "cos": tensor("B W rotary_half", "float32"),
        "sin": tensor("B W rotary_half", "float32"),
        "k_rings": _many_rings(),
        "v_rings": _many_rings(),
        "slots": ints("B"),
        "start": ints("B"),
        "live": ints("B"),
    },
    outputs={},
    attributes={
        "layers": int,
        "kv_heads": int,
        "head_dim": int,
        "rotary_half": int,
        "eps": float,
    },
    reference=reference,
    flops=lambda n: (
        n.layers
        * n.B
        * n.W
        * n.kv_heads
        * (4 * n.head_dim * n.H + 4 * n.head_dim + 6 * n.rotary_half)
    ),
    writes={"k_rings": _stored, "v_rings": _stored},
    check=lambda n: (
        None
        if 2 * n.rotary_half <= n.head_dim
        else f"the rotary part of 2*{n.rotary_half} channels is wider than a head of {n.head_dim}"
    ),
    opaque=True,
)
