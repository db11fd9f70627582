"""paged_attention: causal attention of a block over paged keys and values.

Math:     o[b,i,h] = sum_p softmax_p(q[b,i,h] . K[p,g] / sqrt(D)) V[p,g],
          p <= start[b] + i, position p in page page_table[b, p // page_size], g = h // (N/G)
Shapes:   q [B, W, N, D]; k_pages, v_pages [pages, G, page_size, D]; page_table [B, M] int32;
          start, live [B] int32; o [B, W, N*D]. The pages hold the block's own keys and values too
Numeric:  evaluated unrounded, one rounding at the store; row-invariant: positions are split at
          multiples of page_size, and the pages' sums are added from left to right
Effects:  writes all of o, zeros in columns i >= live[b]; positions from start[b] + live[b] on,
          other pages and their table entries have no effect
Raises:   ShapeError if G does not divide N
Source:   spec "The target" (gated full attention), "Numerics" (split at absolute positions)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.op import Op, Sizes, ints, state, tensor

#: Columns of one product. A shorter block is padded: a column meets one product in all blocks.
_COLUMN_TILE: Final = 8


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
) -> Tensor:
    batch, columns, heads, width = q.shape
    page_size = k_pages.shape[2]
    output = torch.zeros(batch, columns, heads, width, dtype=q.dtype, device=q.device)
    starts, lives = start.tolist(), live.tolist()
    ends = [first + count if count else 0 for first, count in zip(starts, lives, strict=True)]
    pages = -(-max(ends) // page_size)
    if pages:
        # Float64: where BLAS sums in another order at another place of a tile, rounding hides it.
        queries = q.double() * width**-0.5
        keys, values = _gathered(k_pages, v_pages, page_table[:, :pages].clone(), ends)
    for first in range(0, max(lives), _COLUMN_TILE):
        after = first + _COLUMN_TILE
        tile = functional.pad(queries[:, first:after], (0, 0, 0, 0, 0, max(after - columns, 0)))
        # The pages that some column of the tile sees, and how many of them all columns see whole.
        near = -(-max(map(min, ends, (s + after for s in starts))) // page_size)
        whole = min(s + first for s, n in zip(starts, lives, strict=True) if n > first) // page_size
        position = torch.arange(whole * page_size, near * page_size, device=q.device)
        last = start[:, None] + torch.arange(first, after, device=q.device)  # [B, 8]
        # [B, pages, 8, page_size], of the pages that not all columns see whole
        hidden = position.view(-1, 1, page_size) > last[:, None, :, None]
        sums = _weighted_sums(tile, keys[:, :near], values[:, :near], hidden)
        output[:, first:after] = (sums[..., :-1] / sums[..., -1:])[:, : columns - first]
    for request, count in enumerate(lives):
        if count < columns:
            output[request, count:] = 0.0
    return output.flatten(2)


def _gathered(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, ends: list[int]
) -> tuple[Tensor, Tensor]:
    """Keys and values of every request up to its end, `[B, pages, G, page_size, D and D + 1]`.

    Values are zero from a request's end on: a masked weight is zero, but zero times NaN is not.
    A column of ones behind the values makes one product give the weighted sum and the weights' sum.
    """
    page_size = k_pages.shape[2]
    for request, end in enumerate(ends):
        table[request, -(-end // page_size) :] = 0
    keys, gathered = (pages.index_select(0, table.flatten()) for pages in (k_pages, v_pages))
    values = functional.pad(gathered.double(), (0, 1), value=1.0).unflatten(0, table.shape)
    for request, end in enumerate(ends):
        page, offset = divmod(end, page_size)
        values[request, page : page + 1, :, offset:] = 0.0
        values[request, page + 1 :] = 0.0
    return keys.double().unflatten(0, table.shape), values


def _weighted_sums(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Sums of values, and of ones, under unnormalized softmax weights: `[B, 8, N, D + 1]`."""
    batch, pages, kv_heads, page_size, width = keys.shape
    columns, heads = q.shape[1], q.shape[2]
    group = heads // kv_heads
    rows = q.view(batch, 1, columns, kv_heads, group, width).transpose(2, 3)
    rows = rows.expand(-1, pages, -1, -1, -1, -1).reshape(-1, columns * group, width)
    scores = torch.bmm(rows, keys.reshape(-1, page_size, width).transpose(1, 2))
    scores = scores.view(batch, pages, kv_heads, columns, group, page_size)
    masked = scores[:, pages - hidden.shape[1] :]
    masked.masked_fill_(hidden[:, :, None, :, None], float("-inf"))
    weights = scores.sub_(scores.amax((1, 5), keepdim=True)).exp_()
    weights = weights.view(-1, columns * group, page_size)
    parts = torch.bmm(weights, values.reshape(-1, page_size, width + 1))
    parts = parts.view(batch, pages, kv_heads, columns, group, width + 1)
    # One page after the other: a sum over the axis could take another order when there are more
    # pages. A page that a column does not see adds exact zeros.
    total = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        total += part
    return total.transpose(1, 2).reshape(batch, columns, heads, width + 1)


def _check(n: Sizes) -> str | None:
    return f"G = {n.G} must divide N = {n.N}" if n.N % n.G else None


def _pairs(n: Sizes) -> int:
    """Pairs of a query column and a position that it sees, in one request."""
    return n.W * n.context + n.W * (n.W + 1) // 2


def _seen(n: Sizes) -> int:
    return n.B * (n.context + n.W) * n.G * n.D


OP = Op(
    name="paged_attention",
    inputs={
        "q": tensor("B W N D"),
        "k_pages": state("pages G page_size D"),
        "v_pages": state("pages G page_size D"),
        "page_table": ints("B M"),
        "start": ints("B"),
        "live": ints("B"),
    },
    outputs={"o": tensor("B W N*D")},
    reference=reference,
    flops=lambda n: n.B * n.N * (_pairs(n) * (4 * n.D + 4) + n.W * n.D),
    reads={
        "k_pages": _seen,
        "v_pages": _seen,
        "page_table": lambda n: n.B * -(-(n.context + n.W) // n.page_size),
    },
    check=_check,
    opaque=True,
)
