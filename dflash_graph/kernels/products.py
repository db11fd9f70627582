"""Kernels of products of rows with a weight."""

from __future__ import annotations

from dflash_graph.kernels.registry import (
    SHARED_BUDGET,
    Choice,
    Kernel,
    power_of_two,
    register,
    row_bucket,
)
from dflash_graph.op import Sizes


def _linear_choice(n: Sizes, dtype: str) -> Choice:
    """Enough programs to fill a device, and tens of kilobytes in flight for each.

    64 features are the M of a warp group's instruction on Hopper; narrow products take less, so
    that more programs share them. float32 has no tensor cores and takes small tiles, since the
    operands of a step stand in registers. Stages are what may depend on the rows: they overlap
    loads and leave the order of the sum alone.
    """
    if dtype == "float32":
        return Choice({"BLOCK_O": 32, "BLOCK_I": 32}, num_warps=4, num_stages=3)
    block_o = 64 if n.O >= 64 * 128 else 32 if n.O >= 32 * 128 else 16
    block_i = min(power_of_two(n.I), 128)
    step = 2 * (block_o + row_bucket(n.B * n.W)) * block_i  # bytes
    steps = -(-n.I // block_i)
    num_stages = min(4, steps, max(2, 1 + SHARED_BUDGET // step))
    return Choice({"BLOCK_O": block_o, "BLOCK_I": block_i}, num_warps=4, num_stages=num_stages)


register(
    Kernel(
        op="linear",
        holes=lambda n: {
            "O": n.O,
            "I": n.I,
            "unrounded": False,
            "BLOCK_R": row_bucket(n.B * n.W),
        },
        choose=_linear_choice,
        # Without tiles it is prefill's product over all rows, a library call.
        takes=lambda n: n.tiled,
    )
)
