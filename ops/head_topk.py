"""head_topk: the stable top-k of each column's public scores (DFlash2 candidates).

Math:     s as in head_scores; ids[b,i,:], scores[b,i,:] = the first top_k of (s[b,skip+i,v], v <
          public_vocab) by descending score, lower id first on ties
Shapes:   x [B, W, H]; weight [V, H]; ids [B, W-skip, top_k] int32; scores [B, W-skip, top_k]
          float32
Numeric:  scores in float32, -0.0 ties with 0.0; row-invariant. NaN ranks first; ids are valid and
          distinct always; rows >= public_vocab have no effect, NaN or not
Effects:  writes all of ids and scores; the first `skip` columns are not looked at
Raises:   ShapeError if skip, top_k, public_vocab or softcap is out of range
Source:   spec "The drafts" (DFlash2 selector: u_i, C_i)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph import head
from dflash_graph.op import Op, Sizes, ints, tensor, weight


def reference(
    x: Tensor,
    weight: Tensor,
    *,
    skip: int,
    public_vocab: int,
    top_k: int,
    multiplier: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    scores = head.public_scores(
        x, weight, skip=skip, public_vocab=public_vocab, multiplier=multiplier, softcap=softcap
    )
    ids = head.stable_topk(scores, top_k)
    return ids.to(torch.int32), scores.gather(-1, ids)


def _check(n: Sizes) -> str | None:
    if not 0 <= n.skip < n.W:
        return f"skip must be in 0..{n.W - 1} (W = {n.W} columns), got {n.skip}"
    if not 1 <= n.top_k <= n.public_vocab <= n.V:
        return (
            f"expected 1 <= top_k <= public_vocab <= {n.V} (rows of the head), "
            f"got top_k {n.top_k}, public_vocab {n.public_vocab}"
        )
    if n.softcap < 0.0:
        return f"softcap must be 0 (off) or positive, got {n.softcap}"
    return None


OP = Op(
    name="head_topk",
    inputs={"x": tensor("B W H"), "weight": weight("V H")},
    outputs={"ids": ints("B W-skip top_k"), "scores": tensor("B W-skip top_k", "float32")},
    attributes={
        "skip": int,
        "public_vocab": int,
        "top_k": int,
        "multiplier": float,
        "softcap": float,
    },
    reference=reference,
    flops=lambda n: 2 * n.B * (n.W - n.skip) * n.public_vocab * n.H,
    reads={
        "x": lambda n: n.B * (n.W - n.skip) * n.H,
        "weight": lambda n: n.public_vocab * n.H,
    },
    check=_check,
)
