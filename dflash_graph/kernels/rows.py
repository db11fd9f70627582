"""Kernels that work on one row, or one head of a row, at a time."""

from __future__ import annotations

from functools import partial

from dflash_graph.kernels.registry import Kernel, register, row_choice
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue

register(
    Kernel(
        op="rms_norm",
        holes=lambda n: {"H": n.H, "offset": n.offset},
        choose=partial(row_choice, "BLOCK_H", "H"),
        scalars=("eps",),
    )
)


def norm_rope_holes(n: Sizes) -> dict[str, HoleValue]:
    """Holes of the heads that are normed and turned, here and where they go straight to pages."""
    return {
        "query_parts": n.query_parts,
        "Q_HEADS": n.q_heads,
        "KV_HEADS": n.kv_heads,
        "D": n.head_dim,
        "R": n.rotary_half,
        "offset": n.offset,
    }


register(
    Kernel(
        op="head_norm_rope",
        holes=norm_rope_holes,
        choose=partial(row_choice, "BLOCK_D", "head_dim"),
        scalars=("eps",),
    )
)
