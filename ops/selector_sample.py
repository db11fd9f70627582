"""selector_sample: the left-to-right walk over the candidates, drawn where the row has a
temperature (DFlash2).

Math:     E as in selector_walk, with pred = drafts[b,i-1] (the anchor at i = 0)
          temperature[b] <= 0: j = lowest c attaining max E;  q = one-hot at j
          temperature[b]  > 0: q = softmax(E / temperature[b]);  j = first c with
              u < q_0 + .. + q_c, the last c with q_c > 0 if rounding leaves none
          ranks[b,i] = j;  drafts[b,i] = candidates[b,i,j];  draft_probs[b,i] = q
          u = Philox4x32-10 number of key seed[b] and counter (frontier[b] + i, PROPOSAL, 0, 0)
Shapes:   candidates [B, K, C] int32; scores [B, K, C] float32; hidden [B, K+1, R], column i+1 of
          proposal i; anchor [B] int32; predecessor, successor [V, R]; temperature [B] float32;
          seed [B, 2] int32, low and high word; frontier [B] int32; drafts, ranks [B, K] int32;
          draft_probs [B, K, C] float32
Numeric:  E rounded once to float32; q from it unrounded, rounded once; the draw sums the rounded q
          in float64; row-invariant. With NaN in E the rank is some valid one, and q of a row with
          a temperature is NaN
Effects:  writes all of drafts, ranks and draft_probs
Raises:   ShapeError if K = 0
Source:   spec "The drafts" (DFlash2 selector), "Sampling and verification" (random numbers)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.head import lowest_argmax
from dflash_graph.op import Op, ints, tensor, weight
from dflash_graph.philox import Purpose, uniform
from dflash_graph.sampling import draw, softmax
from dflash_graph.selector import walk


def sample_path(
    candidates: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The walk with given uniform numbers `[B, K]`."""
    greedy = temperature <= 0.0
    heat = torch.where(greedy, 1.0, temperature)
    laws = []

    def choose(i: int, energies: Tensor) -> Tensor:
        law = softmax(energies, heat)
        rank = torch.where(greedy, lowest_argmax(energies), draw(law, uniforms[:, i]))
        mass = functional.one_hot(rank, energies.shape[-1]).to(law.dtype)
        laws.append(torch.where(greedy.unsqueeze(1), mass, law))
        return rank

    drafts, ranks = walk(candidates, scores, hidden, anchor, predecessor, successor, choose)
    return drafts, ranks, torch.stack(laws, 1)


def reference(
    candidates: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    temperature: Tensor,
    seed: Tensor,
    frontier: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    column = torch.arange(candidates.shape[1], device=candidates.device)
    uniforms = uniform(seed, frontier.long().unsqueeze(1) + column, Purpose.PROPOSAL)
    return sample_path(
        candidates, scores, hidden, anchor, predecessor, successor, temperature, uniforms
    )


OP = Op(
    name="selector_sample",
    inputs={
        "candidates": ints("B K C"),
        "scores": tensor("B K C", "float32"),
        "hidden": tensor("B K+1 R"),
        "anchor": ints("B"),
        "predecessor": weight("V R"),
        "successor": weight("V R"),
        "temperature": tensor("B", "float32"),
        "seed": ints("B 2"),
        "frontier": ints("B"),
    },
    outputs={
        "drafts": ints("B K"),
        "ranks": ints("B K"),
        "draft_probs": tensor("B K C", "float32"),
    },
    reference=reference,
    # Six more than the greedy walk for each candidate: difference, division, exponential, sum,
    # normalization, running sum.
    flops=lambda n: n.B * n.K * (n.R + 2 * n.C * n.R + 7 * n.C),
    reads={
        "hidden": lambda n: n.B * n.K * n.R,
        "predecessor": lambda n: n.B * n.K * n.R,
        "successor": lambda n: n.B * n.K * n.C * n.R,
    },
    check=lambda n: None if n.K >= 1 else "a walk has at least one proposal, got K = 0",
    # A recurrence over K short steps: tracing unrolls it into many tiny kernels.
    opaque=True,
)
