"""append_kv: stores the keys and values of a block in paged state.

Math:     pages[page_table[b, p // page_size], :, p % page_size] := column i,
          p = start[b] + i, i < live[b]
Shapes:   k, v [B, W, G, D]; k_pages, v_pages [pages, G, page_size, D]; page_table [B, M] int32;
          start, live [B] int32
Numeric:  a copy
Effects:  writes the live columns' places of k_pages and v_pages, no other byte; table entries of
          other pages are not read
Source:   spec "State" (paged K/V)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, state, tensor


def reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
) -> None:
    page_size = k_pages.shape[2]
    columns = torch.arange(k.shape[1], device=k.device)
    row, column = torch.nonzero(columns < live[:, None], as_tuple=True)
    position = start.long()[row] + column
    page = page_table.long()[row, position // page_size]
    for pages, block in ((k_pages, k), (v_pages, v)):
        pages[page, :, position % page_size] = block[row, column]


def _entries(n: Sizes) -> int:
    """Page table entries of the pages that a block touches."""
    last = n.context + n.W - 1
    return n.B * (last // n.page_size - n.context // n.page_size + 1)


def _block(n: Sizes) -> int:
    return n.B * n.W * n.G * n.D


OP = Op(
    name="append_kv",
    inputs={
        "k": tensor("B W G D"),
        "v": tensor("B W G D"),
        "k_pages": state("pages G page_size D", updates=True),
        "v_pages": state("pages G page_size D", updates=True),
        "page_table": ints("B M"),
        "start": ints("B"),
        "live": ints("B"),
    },
    outputs={},
    reference=reference,
    flops=lambda n: 0,
    reads={"page_table": _entries},
    writes={"k_pages": _block, "v_pages": _block},
    opaque=True,
)
