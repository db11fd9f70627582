"""Exact sampling: the processed target law of a row, draws from it, and the acceptance of a chain.

Laws stand in rank order, so that a filter is a length and a draw is the first rank whose running
sum exceeds a uniform number. Exponentials and running sums are float64; the probabilities of a law
are rounded once, to the accumulator's dtype, and everything after it starts from these. Running
sums, never reductions: a sum then has the same bits whatever stands past its last term, and so a
row has the same law and the same draw in every company.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.arithmetic import accumulator
from dflash_graph.head import lowest_argmax, stable_topk
from dflash_graph.philox import Purpose, uniform


class Controls(NamedTuple):
    """Sampling values of rows, each `[B]`; float32, `top_k` int32."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor

    def of(self, rows: Tensor) -> Controls:
        return Controls(*(value[rows] for value in self))


class Law(NamedTuple):
    """Distributions of N rows: ids by falling logit, lower id first, and their probabilities.

    Args:
        ids: `[N, R]` int64; R is the vocabulary, or less where every row has a top-k.
        probs: `[N, R]`, zero past what the filters keep.
    """

    ids: Tensor
    probs: Tensor

    def of(self, rows: Tensor) -> Law:
        return Law(self.ids[rows], self.probs[rows])


class Proposals(NamedTuple):
    """Drafts `[B, K]` and the law each was drawn from: ids and probabilities `[B, K, C]`."""

    drafts: Tensor
    ids: Tensor
    probs: Tensor

    def column(self, i: int, rows: Tensor) -> Proposals:
        return Proposals(self.drafts[rows, i], self.ids[rows, i], self.probs[rows, i])


class Draws(NamedTuple):
    """Uniform numbers of a round: `accept` `[B, K]` tests draft i, `emit` `[B, W]` draws the token
    that column i emits.
    """

    accept: Tensor
    emit: Tensor


def penalized(scores: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """`scores - presence * [c > 0] - frequency * c` of rows `[N, V]`, rounded once."""
    wide = scores.double() - presence.double().unsqueeze(1) * (counts > 0)
    return (wide - frequency.double().unsqueeze(1) * counts).to(scores.dtype)


def target_law(logits: Tensor, controls: Controls) -> Law:
    """The processed law of penalized public logits.

    In this order: divide by the temperature, sort, keep top-k, normalize; cut what is below
    `min_p * p_max`, and after the shortest prefix whose mass reaches top-p; normalize.

    Args:
        logits: `[N, V]`, the greatest of each row finite, no NaN.
        controls: of the N rows, every temperature positive.
    """
    size = logits.shape[-1]
    top_k = controls.top_k.long()
    limit = torch.where(top_k > 0, top_k.clamp(max=size), size)
    ids = _ranked(logits, int(limit.max()))
    ranked = logits.gather(-1, ids).double()
    weights = torch.exp((ranked - ranked[:, :1]) / controls.temperature.double().unsqueeze(1))
    mass = weights.cumsum(-1)
    top_p = controls.top_p.double()
    reached = top_p.unsqueeze(1) * mass.gather(-1, limit.unsqueeze(1) - 1)
    # The best rank weighs 1, so that a weight is its share of p_max.
    by_share = (weights >= controls.min_p.double().unsqueeze(1)).sum(-1)
    by_mass = torch.where(top_p < 1.0, (mass < reached).sum(-1) + 1, size)
    kept = torch.minimum(torch.minimum(by_share, by_mass), limit).clamp(min=1).unsqueeze(1)
    rank = torch.arange(ids.shape[-1], device=ids.device)
    probs = torch.where(rank < kept, weights, 0.0) / mass.gather(-1, kept - 1)
    return Law(ids, probs.to(accumulator(logits)))


def softmax(energies: Tensor, temperature: Tensor) -> Tensor:
    """`softmax(E / temperature)` over the last axis, rounded once; temperatures are positive."""
    best = energies.amax(-1, keepdim=True).double()
    weights = torch.exp((energies.double() - best) / temperature.double().unsqueeze(-1))
    return (weights / weights.cumsum(-1)[..., -1:]).to(accumulator(energies))


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse CDF: the first rank whose running sum exceeds `u`.

    Rounding may leave `u` at or above the whole sum: then the last rank that has a probability.

    Args:
        probs: `[N, R]`.
        uniforms: `[N]`, in [0, 1).

    Returns:
        `[N]` int64 ranks; of a row with NaN some valid one.
    """
    mass = probs.double().cumsum(-1)
    rank = (mass <= uniforms.double().unsqueeze(-1)).sum(-1)
    place = torch.arange(probs.shape[-1], device=probs.device)
    return torch.minimum(rank, torch.where(probs > 0.0, place, 0).amax(-1))


def probability(law: Law, ids: Tensor) -> Tensor:
    """Probabilities `[N, C]` of the ids `[N, C]` under each row's law."""
    return functional.pad(law.probs, (0, 1)).gather(-1, _ranks_of(law, ids))


def accepts(p: Tensor, q: Tensor, uniforms: Tensor) -> Tensor:
    """Whether drafts with target and draft probabilities p and q pass: `u q < p`, exact product."""
    return uniforms.double() * q.double() < p.double()


def residual(law: Law, draft_ids: Tensor, draft_probs: Tensor) -> Law:
    """`normalize(max(p - q, 0))`, or p where rounding leaves nothing (or q is NaN).

    Args:
        law: p, N rows.
        draft_ids, draft_probs: q, `[N, C]`; it is zero elsewhere.
    """
    left = functional.pad(law.probs.double(), (0, 1))
    left.scatter_add_(-1, _ranks_of(law, draft_ids), -draft_probs.double())
    left = left[:, :-1].clamp(min=0.0)
    total = left.cumsum(-1)[:, -1:]
    probs = torch.where(total > 0.0, left / total, law.probs.double())
    return Law(law.ids, probs.to(law.probs.dtype))


def round_draws(
    seed: Tensor, frontier: Tensor, live_drafts: Tensor, columns: int, final: Purpose
) -> Draws:
    """The numbers of a round; column `i` decides the token at position `frontier + i + 1`.

    Args:
        seed: `[B, 2]` int32.
        frontier, live_drafts: `[B]` int32.
        columns: W.
        final: purpose of the draw that follows no rejection.
    """
    column = torch.arange(columns, device=seed.device)
    position = frontier.long().unsqueeze(1) + 1 + column
    corrects = column < live_drafts.unsqueeze(1)
    return Draws(
        uniform(seed, position[:, :-1], Purpose.ACCEPT),
        torch.where(
            corrects,
            uniform(seed, position, Purpose.CORRECTION),
            uniform(seed, position, final),
        ),
    )


def accept_chain(
    scores: Tensor,
    counts: Tensor,
    slots: Tensor,
    live_drafts: Tensor,
    proposals: Proposals,
    controls: Controls,
    draws: Draws,
    public_vocab: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Accept the longest admissible prefix of each row's drafts and emit one token after it.

    Reads only columns whose drafts before them were accepted. A column without a finite greatest
    logit, or with NaN, ends its row there with some valid id.

    Args:
        scores: `[B, W, V]`, head scores of every column.
        counts: `[slots, V]` int32, times generated so far.
        slots, live_drafts: `[B]` int32.
        proposals, controls, draws: of the B rows; K = W - 1.
        public_vocab: ids at or above it are masked.

    Returns:
        accepted, licensed `[B]`, outputs `[B, W]` (-1 past the licensed) and finite `[B]`, int32.
    """
    batch, columns, _ = scores.shape
    live = live_drafts.long()
    dead = torch.arange(columns - 1, device=scores.device) >= live.unsqueeze(1)
    # Dead drafts may hold anything. One more column, dead in every row, makes the last like others.
    ended = Proposals(
        functional.pad(proposals.drafts.long().masked_fill(dead, 0), (0, 1)),
        functional.pad(proposals.ids.long().masked_fill(dead.unsqueeze(2), 0), (0, 0, 0, 1)),
        functional.pad(proposals.probs, (0, 0, 0, 1)),
    )
    accept = functional.pad(draws.accept, (0, 1))
    outputs = torch.full((batch, columns), -1, dtype=torch.int64, device=scores.device)
    accepted = torch.zeros_like(live)
    finite = torch.ones_like(live)
    rows = torch.arange(batch, device=scores.device)
    for i in range(columns):
        logits = _column_logits(
            scores[rows, i, :public_vocab],
            counts,
            slots[rows].long(),
            ended.drafts[rows, :i],
            controls.of(rows),
        )
        healthy = logits.amax(-1).isfinite()
        checks = healthy & (live[rows] > i)
        sampled = healthy & (controls.temperature[rows] > 0.0)
        chosen = torch.zeros_like(rows)
        confirmed = torch.zeros_like(healthy)
        part = (~sampled).nonzero().squeeze(1)
        if len(part):
            chosen[part] = best = lowest_argmax(logits[part])
            confirmed[part] = checks[part] & (best == ended.drafts[rows[part], i])
        part = sampled.nonzero().squeeze(1)
        if len(part):
            row = rows[part]
            chosen[part], confirmed[part] = _sampled_column(
                target_law(logits[part], controls.of(row)),
                ended.column(i, row),
                checks[part],
                accept[row, i],
                draws.emit[row, i],
            )
        outputs[rows, i] = chosen
        finite[rows] = healthy.long()
        rows = rows[confirmed]
        accepted[rows] += 1
        if not len(rows):
            break
    return (
        accepted.to(torch.int32),
        (accepted + 1).to(torch.int32),
        outputs.to(torch.int32),
        finite.to(torch.int32),
    )


def _sampled_column(
    law: Law, proposal: Proposals, checks: Tensor, accept: Tensor, emit: Tensor
) -> tuple[Tensor, Tensor]:
    """The token of each row, and whether it is a draft that was accepted."""
    draft = proposal.drafts.unsqueeze(1)
    p = probability(law, draft).squeeze(1)
    q = torch.where(proposal.ids == draft, proposal.probs, 0.0).sum(-1)
    confirmed = checks & accepts(p, q, accept)
    chosen = proposal.drafts.clone()
    ends = (~confirmed).nonzero().squeeze(1)  # only a row that goes no further draws
    if len(ends):
        law = law.of(ends)
        left = residual(law, proposal.ids[ends], proposal.probs[ends]).probs
        rank = draw(torch.where(checks[ends].unsqueeze(1), left, law.probs), emit[ends])
        chosen[ends] = law.ids.gather(-1, rank.unsqueeze(1)).squeeze(1)
    return chosen, confirmed


def _column_logits(
    scores: Tensor, counts: Tensor, slots: Tensor, before: Tensor, controls: Controls
) -> Tensor:
    """Penalized scores `[N, public_vocab]`, given the drafts `before` the column, `[N, i]`."""
    part = ((controls.presence != 0.0) | (controls.frequency != 0.0)).nonzero().squeeze(1)
    if not len(part):
        return scores
    seen = counts[slots[part], : scores.shape[1]].long()
    seen.scatter_add_(1, before[part], torch.ones_like(before[part]))
    scores = scores.clone()
    scores[part] = penalized(scores[part], seen, controls.presence[part], controls.frequency[part])
    return scores


def _ranked(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` greatest logits, falling, lower id first."""
    if count < logits.shape[-1]:
        return stable_topk(logits, count)
    # -0.0 + 0.0 is 0.0, which ties with itself on every device
    return torch.sort(logits + 0.0, dim=-1, descending=True, stable=True).indices


def _ranks_of(law: Law, ids: Tensor) -> Tensor:
    """Rank `[N, C]` of each id `[N, C]`, R where the law does not list it."""
    rows, ranks = law.ids.shape
    vocab = 1 + max(int(law.ids.max()), int(ids.max()))
    table = torch.full((rows, vocab), ranks, device=ids.device)
    place = torch.arange(ranks, device=ids.device).expand(rows, ranks)
    return table.scatter_(1, law.ids, place).gather(1, ids)
