"""Kernels of the output head: scores, the best id, the first k."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import (
    SHARED_BUDGET,
    Kernel,
    power_of_two,
    register,
    row_bucket,
)
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue


def _rows(n: Sizes) -> int:
    return n.B * (n.W - n.get("skip", 0))


def _choice(n: Sizes, dtype: str) -> Choice:
    """Tall tiles, since every tile reads all rows of x again; two programs fit a Hopper
    multiprocessor.

    float32 has no tensor cores and takes small tiles. Stages are what may depend on the rows.
    """
    if dtype == "float32":
        return Choice({"BLOCK_O": 32, "BLOCK_I": 32}, num_warps=8, num_stages=3)
    block_i = min(power_of_two(n.H), 64)
    step = 2 * (128 + row_bucket(_rows(n))) * block_i  # bytes
    num_stages = max(2, min(5, -(-n.H // block_i), SHARED_BUDGET // step))
    return Choice({"BLOCK_O": 128, "BLOCK_I": block_i}, num_warps=8, num_stages=num_stages)


def _holes(n: Sizes) -> dict[str, HoleValue]:
    return {"V": n.V, "H": n.H, "capped": n.softcap > 0.0, "BLOCK_R": row_bucket(_rows(n))}


def _key_bytes(n: Sizes, choice: Choice) -> int:
    """Of a key for each row and public tile."""
    return int(8 * _rows(n) * -(-n.public_vocab // choice.tiles["BLOCK_O"]))


def _score_bytes(n: Sizes, choice: Choice) -> int:
    """Of the scores of whole tiles."""
    block = choice.tiles["BLOCK_O"]
    return int(4 * _rows(n) * -(-n.V // block) * block)


register(
    Kernel(
        op="head_scores",
        holes=_holes,
        choose=_choice,
        rows=_rows,
        scalars=("multiplier", "softcap"),
        # Without tiles it is prefill's product over all rows, a library call.
        takes=lambda n: n.tiled,
    )
)
register(
    Kernel(
        op="head_argmax",
        holes=lambda n: {**_holes(n), "skip": n.skip},
        choose=_choice,
        rows=_rows,
        scalars=("public_vocab", "multiplier", "softcap"),
        workspace=_key_bytes,
    )
)
register(
    Kernel(
        op="head_topk",
        holes=lambda n: {**_holes(n), "skip": n.skip, "top_k": n.top_k},
        choose=_choice,
        rows=_rows,
        scalars=("public_vocab", "multiplier", "softcap"),
        # A program of the second launch holds the scores of top_k tiles.
        takes=lambda n: n.top_k <= 64,
        workspace=lambda n, choice: _score_bytes(n, choice) + _key_bytes(n, choice),
    )
)
