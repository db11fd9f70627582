"""Kernels that choose without sampling the target: the selector's walk, greedy acceptance."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue


def _walk_holes(n: Sizes, sampled: bool) -> dict[str, HoleValue]:
    return {"sampled": sampled, "C": n.C, "R": n.R, "V": n.V}


def _walk_choice(n: Sizes, dtype: str) -> Choice:
    """Some eight values of a step's successor rows a thread."""
    block_c, block_r = power_of_two(n.C), power_of_two(n.R)
    tiles = {"BLOCK_C": block_c, "BLOCK_R": block_r, "BLOCK_K": power_of_two(n.K)}
    return Choice(tiles, num_warps=min(16, max(1, block_c * block_r // 256)), num_stages=1)


register(
    Kernel(
        op="accept_greedy",
        holes=lambda n: {},
        choose=lambda n, dtype: Choice({"BLOCK_W": power_of_two(n.W)}, num_warps=1, num_stages=1),
        typed=False,
    )
)
register(
    Kernel(
        op="selector_walk",
        template="selector",
        holes=lambda n: _walk_holes(n, False),
        choose=_walk_choice,
    )
)
register(
    Kernel(
        op="selector_sample",
        template="selector",
        holes=lambda n: _walk_holes(n, True),
        choose=_walk_choice,
    )
)
