"""Kernels of attention, and of what stores keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register, row_choice
from dflash_graph.kernels.rows import norm_rope_holes
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue

#: The most rows of one program.
_ROWS = 128


def _attention_choice(step: int, workers: int, n: Sizes, dtype: str) -> Choice:
    """Programs that share the keys of a request and kv head, one step for most at 2048 positions.

    Nothing depends on the columns: more of them than a program's rows hold are further programs.

    Args:
        step: positions that lie together in state: a page, or any number in a ring.
    """
    block_d, group = power_of_two(n.D), power_of_two(n.N // n.G)
    if dtype == "float32":
        # No tensor cores: the operands of a product stand in registers.
        tiles = {"WORKERS": workers, "ROWS": group, "BLOCK_D": block_d}
        return Choice({**tiles, "BLOCK_P": 16, "BLOCK_C": 16}, num_warps=4, num_stages=1)
    # triton 3.6 gives wrong products for fewer rows than 64 on compute capability 9.0 (of a second
    # product whose right operand comes from registers), and reads outside shared memory.
    rows = max(64, group)
    tiles = {"WORKERS": workers, "ROWS": rows, "BLOCK_D": block_d}
    # Half of a head at a time takes fewer registers than all of it.
    tiles |= {"BLOCK_P": min(64, power_of_two(step)), "BLOCK_C": max(16, block_d // 2)}
    return Choice(tiles, num_warps=8 if block_d > 128 else 4, num_stages=1)


def _scratch(n: Sizes, choice: Choice) -> int:
    """Of each row and worker: a head's width of float32, the largest score and the sum."""
    return 4 * n.B * n.W * n.N * choice.tiles["WORKERS"] * (n.D + 2)


def _heads(n: Sizes) -> Mapping[str, HoleValue]:
    return {"G": n.G, "GROUP": n.N // n.G, "D": n.D}


register(
    Kernel(
        op="gated_attention",
        holes=lambda n: {**_heads(n), "PAGE_SIZE": n.page_size},
        choose=lambda n, dtype: _attention_choice(n.page_size, 32, n, dtype),
        takes=lambda n: n.N // n.G <= _ROWS,
        workspace=_scratch,
    )
)
register(
    Kernel(
        op="ring_block_attention",
        holes=lambda n: {**_heads(n), "CAPACITY": n.window, "ring": True, "causal": n.causal},
        choose=partial(_attention_choice, 64, 32),
        template="block_attention",
        takes=lambda n: n.N // n.G <= _ROWS,
        workspace=_scratch,
    )
)
register(
    Kernel(
        op="paged_block_attention",
        holes=lambda n: {**_heads(n), "CAPACITY": n.page_size, "ring": False, "causal": n.causal},
        choose=lambda n, dtype: _attention_choice(n.page_size, 32, n, dtype),
        template="block_attention",
        takes=lambda n: n.N // n.G <= _ROWS,
        workspace=_scratch,
    )
)
register(
    Kernel(
        op="rope_append",
        holes=lambda n: {**norm_rope_holes(n), "PAGE_SIZE": n.page_size},
        choose=partial(row_choice, "BLOCK_D", "head_dim"),
        scalars=("eps",),
    )
)
register(
    Kernel(
        op="append_kv",
        holes=lambda n: {"G": n.G, "D": n.D, "PAGE_SIZE": n.page_size},
        choose=lambda n, dtype: Choice(
            {"BLOCK_G": power_of_two(n.G, 1), "BLOCK_D": power_of_two(n.D)}, num_stages=1
        ),
    )
)
