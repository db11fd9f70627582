"""selector_walk: the greedy left-to-right walk over the candidates (DFlash2).

Math:     E[c] = scores[b,i,c]
                 + sum_r predecessor[pred,r] * hidden[b,i+1,r] * successor[candidates[b,i,c],r]
          ranks[b,i] = lowest c attaining max E;  drafts[b,i] = candidates[b,i,ranks[b,i]]
          pred = anchor[b] at i = 0, drafts[b,i-1] after it
Shapes:   candidates [B, K, C] int32; scores [B, K, C] float32; hidden [B, K+1, R], column i+1 of
          proposal i; anchor [B] int32; predecessor, successor [V, R]; drafts, ranks [B, K] int32
Numeric:  the sum over r unrounded, E rounded once to float32 before it is compared; row-invariant.
          With NaN in E the rank is some valid one
Effects:  writes all of drafts and ranks
Source:   spec "The drafts" (DFlash2 selector, temperature <= 0)
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph.head import lowest_argmax
from dflash_graph.op import Op, ints, tensor, weight
from dflash_graph.selector import walk


def reference(
    candidates: Tensor,
    scores: Tensor,
    hidden: Tensor,
    anchor: Tensor,
    predecessor: Tensor,
    successor: Tensor,
) -> tuple[Tensor, Tensor]:
    return walk(
        candidates,
        scores,
        hidden,
        anchor,
        predecessor,
        successor,
        lambda _, energies: lowest_argmax(energies),
    )


OP = Op(
    name="selector_walk",
    inputs={
        "candidates": ints("B K C"),
        "scores": tensor("B K C", "float32"),
        "hidden": tensor("B K+1 R"),
        "anchor": ints("B"),
        "predecessor": weight("V R"),
        "successor": weight("V R"),
    },
    outputs={"drafts": ints("B K"), "ranks": ints("B K")},
    reference=reference,
    flops=lambda n: n.B * n.K * (n.R + 2 * n.C * n.R + n.C),
    reads={
        "hidden": lambda n: n.B * n.K * n.R,
        "predecessor": lambda n: n.B * n.K * n.R,
        "successor": lambda n: n.B * n.K * n.C * n.R,
    },
    check=lambda n: None if n.K >= 1 else "a walk has at least one proposal, got K = 0",
    # A recurrence over K short steps: tracing unrolls it into many tiny kernels.
    opaque=True,
)
