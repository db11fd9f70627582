"""head_argmax: the best public id of each column and its score.

Math:     s as in head_scores; ids[b,i] = lowest v < public_vocab attaining max_v s[b,skip+i,v];
          scores[b,i] = that maximum
Shapes:   x [B, W, H]; weight [V, H]; ids [B, W-skip] int32; scores [B, W-skip] float32
Numeric:  scores in float32, -0.0 ties with 0.0; row-invariant. A NaN among the public scores of a
          column makes its score NaN and leaves its id a valid one; rows >= public_vocab have no
          effect, NaN or not
Effects:  writes all of ids and scores; the first `skip` columns are not looked at
Raises:   ShapeError if skip, public_vocab or softcap is out of range
Source:   spec "The drafts" (DFlash proposals), "Sampling and verification"
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph import head
from dflash_graph.op import Op, Sizes, ints, tensor, weight


def reference(
    x: Tensor, weight: Tensor, *, skip: int, public_vocab: int, multiplier: float, softcap: float
) -> tuple[Tensor, Tensor]:
    scores = head.public_scores(
        x, weight, skip=skip, public_vocab=public_vocab, multiplier=multiplier, softcap=softcap
    )
    ids = head.lowest_argmax(scores)
    best = scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    spoiled = scores.isnan().any(-1)
    return ids.to(torch.int32), torch.where(spoiled, torch.nan, best)


def _check(n: Sizes) -> str | None:
    if not 0 <= n.skip < n.W:
        return f"skip must be in 0..{n.W - 1} (W = {n.W} columns), got {n.skip}"
    if not 1 <= n.public_vocab <= n.V:
        return f"public_vocab must be in 1..{n.V} (rows of the head), got {n.public_vocab}"
    if n.softcap < 0.0:
        return f"softcap must be 0 (off) or positive, got {n.softcap}"
    return None


OP = Op(
    name="head_argmax",
    inputs={"x": tensor("B W H"), "weight": weight("V H")},
    outputs={"ids": ints("B W-skip"), "scores": tensor("B W-skip", "float32")},
    attributes={"skip": int, "public_vocab": int, "multiplier": float, "softcap": float},
    reference=reference,
    flops=lambda n: 2 * n.B * (n.W - n.skip) * n.public_vocab * n.H,
    reads={
        "x": lambda n: n.B * (n.W - n.skip) * n.H,
        "weight": lambda n: n.public_vocab * n.H,
    },
    check=_check,
)
