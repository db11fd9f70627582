"""Kernels that work on one row, or one head of a row, at a time."""

from __future__ import annotations

from functools import partial

from dflash_graph.kernels.registry import Kernel, register, row_choice

register(
    Kernel(
        op="rms_norm",
        holes=lambda n: {"H": n.H, "offset": n.offset},
        choose=partial(row_choice, "BLOCK_H", "H"),
        scalars=("eps",),
    )
)
register(
    Kernel(
        op="head_norm_rope",
        holes=lambda n: {
            "query_parts": n.query_parts,
            "Q_HEADS": n.q_heads,
            "KV_HEADS": n.kv_heads,
            "D": n.head_dim,
            "R": n.rotary_half,
            "offset": n.offset,
        },
        choose=partial(row_choice, "BLOCK_D", "head_dim"),
        scalars=("eps",),
    )
)
