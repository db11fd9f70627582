"""paged_block_attention: a draft block over its paged context and itself (full draft layers).

Math:     o[b,i,h] = softmax_j(q[b,i,h] . k_j / sqrt(D)) v_j over all context positions [0, F),
          position p in page page_table[b, p // page_size] at offset p % page_size, and block
          columns F..F+live-1 from k, v (those <= F+i if causal); head h reads kv head h // (N/G)
Shapes:   q [B, W, N, D]; k, v [B, W, G, D]; k_pages, v_pages [pages, G, page_size, D]; page_table
          [B, M]; frontier F, live [B] int32; o [B, W, N*D]
Numeric:  float64, one rounding at the store; a request's bits depend on neither B, its row, the
          other rows (their lengths and pages) nor dead columns. Without causality its result
          depends on `live` by definition
Effects:  writes all of o, zeros in columns >= live; entries of page_table past ceil(F / page_size)
          may be anything
Source:   spec "The drafts" (Block), "State" (paged K/V)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.block_attention import DEAD, Keys, block_attention
from dflash_graph.op import Op, Sizes, ints, state, tensor

#: Context positions of one step of the softmax: whole pages, at least one.
STEP = 256


def _steps(
    k_pages: Tensor, v_pages: Tensor, page_table: Tensor, frontier: Tensor
) -> Iterator[Keys]:
    page_size = k_pages.shape[2]
    pages = max(1, STEP // page_size)
    span = pages * page_size
    count = max(1, -(-int(frontier.max()) // span))
    table = functional.pad(page_table, (0, max(0, count * pages - page_table.shape[1]))).long()
    end = frontier.long().unsqueeze(1)
    for step in range(count):
        position = torch.arange(step * span, (step + 1) * span, device=k_pages.device)
        used = position[::page_size] < end
        page = torch.where(used, table[:, step * pages : (step + 1) * pages], 0)
        k, v = (
            pool[page].transpose(2, 3).flatten(1, 2)  # [B, span, G, D]
            for pool in (k_pages, v_pages)
        )
        yield Keys(k, v, torch.where(position < end, position, DEAD))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    frontier: Tensor,
    live: Tensor,
    *,
    causal: bool,
) -> Tensor:
    context = _steps(k_pages, v_pages, page_table, frontier)
    return block_attention(q, k, v, context, frontier, live, causal=causal)


def _pairs(n: Sizes) -> int:
    """Visible (query, key) pairs of a request whose columns are all live."""
    return n.W * n.context + (n.W * (n.W + 1) // 2 if n.causal else n.W * n.W)


def _page_elements(n: Sizes) -> int:
    return n.B * n.context * n.G * n.D


OP = Op(
    name="paged_block_attention",
    inputs={
        "q": tensor("B W N D"),
        "k": tensor("B W G D"),
        "v": tensor("B W G D"),
        "k_pages": state("pages G page_size D"),
        "v_pages": state("pages G page_size D"),
        "page_table": ints("B M"),
        "frontier": ints("B"),
        "live": ints("B"),
    },
    outputs={"o": tensor("B W N*D")},
    attributes={"causal": bool},
    reference=reference,
    flops=lambda n: 4 * n.B * n.N * n.D * _pairs(n),
    reads={
        "k_pages": _page_elements,
        "v_pages": _page_elements,
        "page_table": lambda n: n.B * -(-n.context // n.page_size),
    },
    check=lambda n: None if n.N % n.G == 0 else f"{n.N} q heads do not divide among {n.G} kv heads",
    opaque=True,
)
