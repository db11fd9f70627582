"""Kernels of Gated DeltaNet layers: a block's recurrence and its commit."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes


def _choose(key_dim: int, value_dim: int) -> Choice:
    """At most 64 values of the state a thread; four warps share the work of one convolution.

    Both ops take the same, since a fold must have the bits of the run before it.
    """
    rows = min(64, power_of_two(value_dim), max(16, 64 * 128 // power_of_two(key_dim)))
    return Choice({"BLOCK_V": rows}, num_warps=4, num_stages=1)


def _mixer_workspace(n: Sizes, choice: Choice) -> int:
    """Of a program and column: query, key and gates; of a column: what the norm reads."""
    blocks = -(-n.value_dim // choice.tiles["BLOCK_V"])
    scratch = blocks * (2 * power_of_two(n.key_dim, 32) + 4)
    return 4 * n.B * n.W * n.value_heads * (scratch + n.value_dim)


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
        choose=lambda n, dtype: _choose(n.key_dim, n.value_dim),
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
        choose=lambda n, dtype: _choose(n.Dk, n.Dv),
    )
)
