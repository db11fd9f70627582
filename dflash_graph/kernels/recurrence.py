"""Kernels of Gated DeltaNet layers: a block's recurrence and its commit."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes


def _choose(values: int, key_dim: int, value_dim: int) -> Choice:
    """Four warps share the work of one convolution.

    Args:
        values: of the state, at most so many a thread.
    """
    rows = min(values, power_of_two(value_dim), max(16, values * 128 // power_of_two(key_dim)))
    return Choice({"BLOCK_V": rows}, num_warps=4, num_stages=1)


def _mixer_workspace(n: Sizes, choice: Choice) -> int:
    """Of a program and column: query, key, value and gates; of a column: what the norm reads."""
    block = choice.tiles["BLOCK_V"]
    scratch = -(-n.value_dim // block) * (2 * power_of_two(n.key_dim, 32) + block + 4)
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
        choose=lambda n, dtype: _choose(64, n.key_dim, n.value_dim),
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
        # It only updates, so more programs are worth more than fewer loads of keys.
        choose=lambda n, dtype: _choose(32, n.Dk, n.Dv),
    )
)
