"""Kernels of Gated DeltaNet layers: a block's recurrence and its commit."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes


def _choose(rows: int, key_dim: int, value_dim: int) -> Choice:
    """Two warps wait for each other less than four, and share rows of the state, at most so many
    that a thread has 64 of its values."""
    rows = min(rows, power_of_two(value_dim), max(16, 4096 // power_of_two(key_dim)))
    return Choice({"BLOCK_V": rows}, num_warps=2, num_stages=1)


def _mixer_workspace(n: Sizes, choice: Choice) -> int:
    """Of a column: every vector with four values more, and what the norm reads."""
    block = choice.tiles["BLOCK_V"]
    vector = max(block, power_of_two(n.key_dim, 32), power_of_two(n.value_dim, 1)) + 4
    scratch = (2 * n.key_heads + n.value_heads) * vector
    return 4 * n.B * n.W * (scratch + n.value_heads * n.value_dim)


register(
    Kernel(
        op="gdn_mixer",
        holes=lambda n: {
            "KEY_HEADS": n.key_heads,
            "HEADS": n.value_heads,
            "DK": n.key_dim,
            "DV": n.value_dim,
            "TAPS": n.taps,
        },
        # Few requests want more programs, many fewer that repeat the loads of keys. No sum follows.
        choose=lambda n, dtype: _choose(16 if n.B <= 2 else 32, n.key_dim, n.value_dim),
        scalars=("eps",),
        workspace=_mixer_workspace,
    )
)
register(
    Kernel(
        op="gdn_commit",
        holes=lambda n: {
            "KEY_HEADS": n.Hk,
            "HEADS": n.Hv,
            "DK": n.Dk,
            "DV": n.Dv,
            "CHANNELS": n.C,
            "DEPTH": n.depth,
        },
        choose=lambda n, dtype: _choose(16, n.Dk, n.Dv),
    )
)
