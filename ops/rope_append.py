"""rope_append: heads of a QKV projection, normed and turned; keys and values go to paged state.

Math:     q, k, v = head_norm_rope(qkv, q_norm, k_norm, cos, sin);
          append_kv(k, v, k_pages, v_pages, page_table, start, live)
Shapes:   qkv [B, W, query_parts*q_heads*head_dim + 2*kv_heads*head_dim]; q_norm, k_norm [head_dim];
          cos, sin [B, W, rotary_half] float32; k_pages, v_pages [pages, G, page_size, D],
          G = kv_heads, D = head_dim; page_table [B, M] int32; start, live [B] int32;
          q [B, W, q_heads, head_dim]
Numeric:  unrounded from the projection to the rotated head, one rounding; row-invariant
Effects:  writes all of q, and the live columns' places of k_pages and v_pages, no other byte; table
          entries of other pages are not read
Raises:   ShapeError as head_norm_rope, and if the pages hold other heads
Source:   spec "The target" (gated full attention), "State" (paged K/V)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, Sizes
from dflash_graph.ops import append_kv, head_norm_rope


def reference(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
    *,
    query_parts: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
    offset: bool,
) -> Tensor:
    q, k, v = head_norm_rope.reference(
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        query_parts=query_parts,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_half=rotary_half,
        eps=eps,
        offset=offset,
    )
    append_kv.reference(k, v, k_pages, v_pages, page_table, start, live)
    return q


def _check(n: Sizes) -> str | None:
    found, stated = (n.G, n.D), (n.kv_heads, n.head_dim)
    if found != stated:
        return f"pages of (G, D) = {found} must have {stated}"
    assert head_norm_rope.OP.check is not None
    return head_norm_rope.OP.check(n)


OP = Op(
    name="rope_append",
    inputs={
        **head_norm_rope.OP.inputs,
        **{name: kind for name, kind in append_kv.OP.inputs.items() if name not in ("k", "v")},
    },
    outputs={"q": head_norm_rope.OP.outputs["q"]},
    attributes=head_norm_rope.OP.attributes,
    reference=reference,
    flops=head_norm_rope.OP.flops,
    reads={**head_norm_rope.OP.reads, **append_kv.OP.reads},
    writes=append_kv.OP.writes,
    check=_check,
    opaque=True,
)
