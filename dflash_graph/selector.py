"""The DFlash2 selector's left-to-right walk: one formula for the greedy and the sampled path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_graph.arithmetic import accumulator


def walk(
    candidates: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    choose: Callable[[int, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Choose one candidate of each proposal, left to right, given the choice before it.

    `E[c] = scores[i,c] + sum_r predecessor[pred,r] * hidden[i+1,r] * successor[candidates[i,c],r]`,
    where pred is the anchor at i = 0 and the draft before i after it.

    Args:
        candidates: `[B, K, C]` ids.
        scores: `[B, K, C]`.
        hidden: `[B, K+1, R]`; column `i + 1` belongs to proposal `i`.
        anchor: `[B]` ids.
        predecessor, successor: `[V, R]`.
        choose: `(i, E [B, C])` -> ranks `[B]` int64; E is rounded once, to the accumulator's dtype.

    Returns:
        Drafts and ranks, `[B, K]` int32.
    """
    ids = candidates.long()
    # Everything but the predecessor's row is known before the walk.
    bilinear = hidden[:, 1:].double().unsqueeze(2) * successor[ids].double()  # [B, K, C, R]
    unary = scores.double()
    before = anchor.long()
    drafts, ranks = [], []
    for i in range(ids.shape[1]):
        pair = (bilinear[:, i] * predecessor[before].double().unsqueeze(1)).sum(-1)
        rank = choose(i, (unary[:, i] + pair).to(accumulator(hidden)))
        before = ids[:, i].gather(-1, rank.unsqueeze(-1)).squeeze(-1)
        drafts.append(before)
        ranks.append(rank)
    return torch.stack(drafts, 1).to(torch.int32), torch.stack(ranks, 1).to(torch.int32)
