"""accept_sparse: exact acceptance of drafts by the laws they were drawn from, then one correction
or bonus.

Math:     p_i, u_i, the draws and finite as in accept_one_hot, W = K + 1;
          q_i[v] = draft_probs[b,i,c] where candidates[b,i,c] = v, else 0
          temperature <= 0: accepted A = number of leading i < P with ids[b,i+1] the lowest argmax
              of z_i, which column A then emits
          temperature  > 0: accepted A = number of leading i < P with
              u_i * q_i[ids[b,i+1]] < p_i[ids[b,i+1]]; column A emits a draw from
              normalize(max(p_A - q_A, 0)) if A < P (from p_A if nothing is left), else from p_P
          outputs[b,j] = ids[b,j+1] for j < A, the emitted id at j = A, -1 after it
          licensed = A + 1
Shapes:   as in accept_one_hot; candidates [B, K, C] int32, distinct in each column;
          draft_probs [B, K, C] float32
Numeric:  as in accept_one_hot; u * q is exact. A q that is NaN accepts nothing and leaves p
Effects:  writes all outputs; counts is read only; what stands past column A has no effect
Raises:   ShapeError if public_vocab is out of range or K = 0
Source:   spec "The round" (Accept), "Sampling and verification"
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, state, tensor
from dflash_graph.philox import Purpose
from dflash_graph.sampling import Controls, Proposals, accept_chain, round_draws


def reference(
    ids: Tensor,
    candidates: Tensor,
    draft_probs: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return accept_chain(
        scores,
        counts,
        slots,
        live_drafts,
        Proposals(ids[:, 1:], candidates, draft_probs),
        Controls(temperature, top_p, min_p, presence, frequency, top_k),
        round_draws(seed, frontier, live_drafts, ids.shape[1], Purpose.BONUS),
        public_vocab,
    )


def _check(n: Sizes) -> str | None:
    if n.K < 1:
        return "there is at least one draft to accept, got K = 0; accept_one_hot takes W = 1"
    if not 1 <= n.public_vocab <= n.V:
        return f"public_vocab must be in 1..{n.V} (V, rows of the head), got {n.public_vocab}"
    return None


OP = Op(
    name="accept_sparse",
    inputs={
        "ids": ints("B W"),
        "candidates": ints("B K C"),
        "draft_probs": tensor("B K C", "float32"),
        "scores": tensor("B K+1 V", "float32"),
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
    attributes={"public_vocab": int},
    reference=reference,
    # accept_one_hot's, u * q for each draft, and the differences of one rejected column.
    flops=lambda n: n.B * (n.public_vocab * (8 * n.W + 1) + n.K + n.C),
    reads={
        "scores": lambda n: n.B * n.W * n.public_vocab,
        "counts": lambda n: n.B * n.public_vocab,
    },
    check=_check,
    opaque=True,
)
