"""Kernels that move rows: embeddings, ids, rotary tables, hiddens, features, counts."""

from __future__ import annotations

import struct

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue


def _copy_choice(width: int) -> Choice:
    """A part of a row a program: eight values a thread."""
    block = min(1024, power_of_two(width))
    return Choice({"BLOCK": block}, num_warps=max(1, block // 256), num_stages=1)


def _column_choice(columns: int) -> Choice:
    """The columns of one request a program."""
    return Choice({"BLOCK_W": power_of_two(columns)}, num_warps=1, num_stages=1)


def _rotary_holes(n: Sizes) -> dict[str, HoleValue]:
    sections = n.sections or (0, 0, 0)
    (bits,) = struct.unpack("<q", struct.pack("<d", n.theta))
    return {
        "AXES": n.A,
        "R": n.rotary_half,
        **{f"S{axis}": sections[axis] for axis in range(3)},
        "theta_bits": bits,
    }


register(
    Kernel(
        op="embedding",
        holes=lambda n: {"V": n.V, "H": n.H},
        choose=lambda n, dtype: _copy_choice(n.H),
        scalars=("scale",),
    )
)
register(
    Kernel(
        op="block_ids",
        holes=lambda n: {"MASK": n.mask_token_id},
        choose=lambda n, dtype: _column_choice(n.columns),
        scalars=("columns",),
        typed=False,
    )
)
register(
    Kernel(
        op="verify_ids",
        holes=lambda n: {},
        choose=lambda n, dtype: _column_choice(n.K + 1),
        typed=False,
    )
)
register(
    Kernel(
        op="rotary_table",
        holes=_rotary_holes,
        choose=lambda n, dtype: Choice(
            {"BLOCK_R": power_of_two(n.rotary_half)}, num_warps=1, num_stages=1
        ),
        typed=False,
    )
)
register(
    Kernel(
        op="pending_features",
        template="slot_rows",
        holes=lambda n: {"reads": "pending", "WIDTH": n.width},
        choose=lambda n, dtype: _copy_choice(n.width),
    )
)
register(
    Kernel(
        op="slot_hidden",
        template="slot_rows",
        holes=lambda n: {"reads": "continuation", "WIDTH": n.H},
        choose=lambda n, dtype: _copy_choice(n.H),
    )
)
register(
    Kernel(
        op="stage_features",
        holes=lambda n: {"BLOCKS": n.blocks, "H": n.H},
        choose=lambda n, dtype: _copy_choice(n.H),
    )
)
register(
    Kernel(
        op="stage_hidden",
        holes=lambda n: {"H": n.H},
        choose=lambda n, dtype: _copy_choice(n.H),
    )
)
register(
    Kernel(
        op="count_tokens",
        holes=lambda n: {"V": n.V},
        choose=lambda n, dtype: _column_choice(n.W),
        typed=False,
    )
)
