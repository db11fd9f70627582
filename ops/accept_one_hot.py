"""accept_one_hot: exact acceptance of drafts that are point masses, then one correction or bonus.

Math:     z_i[v] = scores[b,i,v] - presence * [c > 0] - frequency * c, v < public_vocab, with
              c = counts[slots[b],v] + #{j in 1..i: ids[b,j] = v}
          p_i: temperature <= 0: a point mass on the lowest argmax of z_i. Otherwise softmax(z_i /
              temperature) over the first top_k by (falling z, rising id) (all if top_k <= 0), of it
              what is >= min_p * p_max and in the shortest prefix of mass >= top_p, at least the
              best, normalized
          accepted A = number of leading i < P with u_i < p_i[ids[b,i+1]], P = live_drafts[b]
          outputs[b,j] = ids[b,j+1] for j < A; outputs[b,A] = a draw from normalize(p_A without
              ids[b,A+1]) if A < P, from p_P otherwise; -1 after it.  licensed = A + 1
          draws take the first v in rank order whose running sum exceeds u, the last of positive
              mass if rounding leaves none
          u: Philox4x32-10 numbers of key seed[b] and counters (frontier[b] + i + 1, purpose, 0, 0):
              ACCEPT, then CORRECTION after a rejection, BONUS after none, `purpose` where W = 1
          finite = 1 if each column 0..A has a finite greatest z and no NaN among the public ones,
              else 0; a row ends, with some valid id, at the first column that does not
Shapes:   ids (anchor, drafts) [B, W] int32; scores [B, W, V] float32; counts [slots, V] int32,
          times generated so far, the anchor included; slots, live_drafts, frontier, top_k [B]
          int32; temperature, top_p, min_p, presence, frequency [B] float32; seed [B, 2] int32, low
          and high word; accepted, licensed, finite [B], outputs [B, W] int32. W = 1 is plain
          decoding (purpose 1), or the first token of a prompt of frontier + 1 tokens (purpose 0)
Numeric:  z rounded once to float32 (as it is without penalties), -0.0 ties with 0.0; p and the
          residual evaluated unrounded, rounded once to float32; running sums in float64;
          row-invariant
Effects:  writes all outputs; counts is read only; what stands past column A has no effect
Raises:   ShapeError if public_vocab or purpose is out of range
Source:   spec "The round" (Accept), "Sampling and verification"
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, state, tensor
from dflash_graph.philox import Purpose
from dflash_graph.sampling import Controls, Proposals, accept_chain, round_draws


def reference(
    ids: Tensor,
    scores: Tensor,
    counts: Tensor,
    slots: Tensor,
    live_drafts: Tensor,
    frontier: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    presence: Tensor,
    frequency: Tensor,
    top_k: Tensor,
    seed: Tensor,
    *,
    public_vocab: int,
    purpose: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    columns = ids.shape[1]
    drafts = ids[:, 1:]
    final = Purpose.BONUS if columns > 1 else Purpose(purpose)
    return accept_chain(
        scores,
        counts,
        slots,
        live_drafts,
        Proposals(drafts, drafts.unsqueeze(2), torch.ones_like(scores[:, 1:, :1])),
        Controls(temperature, top_p, min_p, presence, frequency, top_k),
        round_draws(seed, frontier, live_drafts, columns, final),
        public_vocab,
    )


def _check(n: Sizes) -> str | None:
    if not 1 <= n.public_vocab <= n.V:
        return f"public_vocab must be in 1..{n.V} (V, rows of the head), got {n.public_vocab}"
    if n.purpose not in (Purpose.PREFILL, Purpose.PLAIN):
        return (
            f"purpose must be {int(Purpose.PREFILL)} (prefill) or {int(Purpose.PLAIN)} (plain "
            f"decoding), got {n.purpose}"
        )
    return None


OP = Op(
    name="accept_one_hot",
    inputs={
        "ids": ints("B W"),
        "scores": tensor("B W V", "float32"),
        "counts": state("slots V", "int32"),
        "slots": ints("B"),
        "live_drafts": ints("B"),
        "frontier": ints("B"),
        "temperature": tensor("B", "float32"),
        "top_p": tensor("B", "float32"),
        "min_p": tensor("B", "float32"),
        "presence": tensor("B", "float32"),
        "frequency": tensor("B", "float32"),
        "top_k": ints("B"),
        "seed": ints("B 2"),
    },
    outputs={
        "accepted": ints("B"),
        "licensed": ints("B"),
        "outputs": ints("B W"),
        "finite": ints("B"),
    },
    attributes={"public_vocab": int, "purpose": int},
    reference=reference,
    # Per public score: penalties 3, difference, division, exponential, sum, normalization. The one
    # draw of a row sums its law once more.
    flops=lambda n: n.B * n.public_vocab * (8 * n.W + 1),
    reads={
        "scores": lambda n: n.B * n.W * n.public_vocab,
        "counts": lambda n: n.B * n.public_vocab,
    },
    check=_check,
    opaque=True,
)
