"""Kernels that choose tokens by sampling: acceptance of drafts by the target's law."""

from __future__ import annotations

from dflash_graph.choices import Choice
from dflash_graph.kernels.registry import Kernel, power_of_two, register
from dflash_graph.op import Sizes
from dflash_graph.rendering import HoleValue

_TESTS = 32  # thresholds of a pass
_SCORES = 0x7F800000 + 0x7F800001  # whole numbers from -infinity to the greatest finite score


def _passes(vocab: int) -> int:
    """Passes that leave one of all rank keys, after one that may leave all of them."""
    width, passes = _SCORES * 2 ** (vocab - 1).bit_length() + 1, 1
    while width > 1:
        width = -(-width // (_TESTS + 1))
        passes += 1
    return passes


def _holes(n: Sizes) -> dict[str, HoleValue]:
    return {
        "V": n.V,
        "PUBLIC": n.public_vocab,
        "PASSES": _passes(n.V),
        "TESTS": _TESTS,
        "BLOCK_W": power_of_two(n.W),
    }


def _choice(n: Sizes, dtype: str) -> Choice:
    """Chunks that order the sums: by the vocabulary alone."""
    return Choice({"CHUNK": min(2048, power_of_two(n.V, 256))}, num_warps=4, num_stages=1)


def _workspace(n: Sizes, choice: Choice) -> int:
    """Of a row: sums of two passes and three values for each chunk, and ten values.

    For an even number of rows, so that every array in it is aligned to 16 bytes.
    """
    rows = n.B * n.W + n.B * n.W % 2
    chunks = -(-n.public_vocab // choice.tiles["CHUNK"])
    return int(8 * rows * (chunks * (2 * _TESTS + 3) + 10))


register(
    Kernel(
        op="accept_one_hot",
        template="accept_sampled",
        holes=lambda n: {**_holes(n), "sparse": False, "C": 1},
        choose=_choice,
        scalars=("purpose",),
        workspace=_workspace,
        typed=False,
    )
)
register(
    Kernel(
        op="accept_sparse",
        template="accept_sampled",
        holes=lambda n: {**_holes(n), "sparse": True, "C": n.C},
        choose=_choice,
        workspace=_workspace,
        typed=False,
    )
)
