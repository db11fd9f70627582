"""gated_attention: causal attention of a block over paged keys and values, then the output gate.

Math:     o = paged_attention(q, k_pages, v_pages, page_table, start, live) in the model dtype;
          y = o * sigmoid(gate), a query head of qkv is [query | gate]
Shapes:   q [B, W, N, D], N = q_heads, D = head_dim; k_pages, v_pages [pages, G, page_size, D],
          G = kv_heads; page_table [B, M] int32; start, live [B] int32;
          qkv [B, W, 2*q_heads*head_dim + 2*kv_heads*head_dim]; y [B, W, q_heads*head_dim]
Numeric:  as the two ops one after the other: two roundings; row-invariant
Effects:  writes all of y, zeros in columns i >= live[b]; what paged_attention says has no effect
          has none here, nor has the gate of a dead column
Raises:   ShapeError if the heads of q, the pages and the attributes differ, or G does not divide N
Source:   spec "The target" (gated full attention), "Numerics" (split at absolute positions)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, Sizes, tensor
from dflash_graph.ops import attention_gate, paged_attention


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
    qkv: Tensor,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> Tensor:
    o = paged_attention.reference(q, k_pages, v_pages, page_table, start, live)
    y = attention_gate.reference(o, qkv, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim)
    for request, count in enumerate(live.tolist()):
        y[request, count:] = 0.0
    return y


def _check(n: Sizes) -> str | None:
    found, stated = (n.N, n.G, n.D), (n.q_heads, n.kv_heads, n.head_dim)
    if found != stated:
        return f"(N, G, D) = {found} must be (q_heads, kv_heads, head_dim) = {stated}"
    return f"G = {n.G} must divide N = {n.N}" if n.N % n.G else None


OP = Op(
    name="gated_attention",
    inputs={
        **paged_attention.OP.inputs,
        "qkv": tensor("B W 2*q_heads*head_dim+2*kv_heads*head_dim"),
    },
    outputs={"y": tensor("B W q_heads*head_dim")},
    attributes={"q_heads": int, "kv_heads": int, "head_dim": int},
    reference=reference,
    flops=lambda n: paged_attention.OP.flops(n) + attention_gate.OP.flops(n),
    reads={**paged_attention.OP.reads, **attention_gate.OP.reads},
    check=_check,
    opaque=True,
)
