"""Output-head scores and the choice of ids from them: one formula and one tie rule for every op.

Scores stay in the accumulator's dtype; -0.0 ties with 0.0; the lowest id wins a tie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.arithmetic import accumulator, matmul_rows


def head_scores(
    x: Tensor, weight: Tensor, *, multiplier: float, softcap: float, tiled: bool = True
) -> Tensor:
    """Scores `[..., V]` of rows `[..., H]`: `s = multiplier * x @ weight.T`, `cap * tanh(s / cap)`.

    Args:
        softcap: the cap; 0 leaves the scores as they are.
        tiled: row-invariant, see `matmul_rows`.
    """
    scores = matmul_rows(x, weight, tiled=tiled, unrounded=True)
    if multiplier == 1.0 and softcap == 0.0:
        return scores
    wide = scores.double() * multiplier
    if softcap > 0.0:
        wide = softcap * torch.tanh(wide / softcap)
    return wide.to(accumulator(x))


def public_scores(
    x: Tensor, weight: Tensor, *, skip: int, public_vocab: int, multiplier: float, softcap: float
) -> Tensor:
    """Scores `[B, W-skip, public_vocab]` of columns `skip..W-1` over the rows a tokenizer knows.

    The product runs over all rows of the head: scores have the bits that `head_scores` gives them.
    """
    return head_scores(x[:, skip:], weight, multiplier=multiplier, softcap=softcap)[
        ..., :public_vocab
    ]


def lowest_argmax(scores: Tensor) -> Tensor:
    """Lowest index (int64) attaining the last axis's maximum; a valid one if a score is NaN."""
    size = scores.shape[-1]
    index = torch.arange(size, device=scores.device)
    attains = scores == scores.amax(-1, keepdim=True)
    return torch.where(attains, index, size).amin(-1).clamp(max=size - 1)


def stable_topk(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` greatest scores, descending, lower index first; NaN ranks first."""
    if scores.dtype is not torch.float32:
        return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    # Whole numbers that order like (score, -index): to select among distinct keys is exact, and 15
    # times faster than the stable sort of a vocabulary.
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(scores.isnan(), 0x7FFFFFFF, ordered).long()
    size = scores.shape[-1]
    keys = ordered * 2**32 + torch.arange(size - 1, -1, -1, device=scores.device)
    return torch.topk(keys, count, dim=-1).indices
