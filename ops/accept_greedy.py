"""accept_greedy: the drafts that the target's argmax confirms, then one correction or bonus.

Math:     accepted A = number of leading i < P with ids[b,i+1] == targets[b,i], P = live_drafts[b]
          licensed = A + 1;  outputs[b,j] = targets[b,j] for j <= A, else -1
          finite = 1 if scores[b,0..A] are all finite, else 0
Shapes:   ids (anchor, drafts), targets (argmax of every column) [B, W] int32; scores [B, W]
          float32; live_drafts [B] int32; accepted, licensed, finite [B] int32; outputs [B, W]
          int32. W = 1 is plain decoding
Numeric:  exact
Effects:  writes all outputs; what stands past column P has no effect
Source:   spec "The round" (Accept), "Sampling and verification" (Greedy; a row that is not finite)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, ints, tensor


def reference(
    ids: Tensor, targets: Tensor, scores: Tensor, live_drafts: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    column = torch.arange(ids.shape[1], device=ids.device)
    confirmed = (ids[:, 1:] == targets[:, :-1]) & (column[:-1] < live_drafts.unsqueeze(1))
    accepted = confirmed.long().cumprod(1).sum(1)
    emitted = column <= accepted.unsqueeze(1)
    finite = (scores.isfinite() | ~emitted).all(1)
    outputs = torch.where(emitted, targets, -1)
    return (
        accepted.to(torch.int32),
        (accepted + 1).to(torch.int32),
        outputs,
        finite.to(torch.int32),
    )


OP = Op(
    name="accept_greedy",
    inputs={
        "ids": ints("B W"),
        "targets": ints("B W"),
        "scores": tensor("B W", "float32"),
        "live_drafts": ints("B"),
    },
    outputs={
        "accepted": ints("B"),
        "licensed": ints("B"),
        "outputs": ints("B W"),
        "finite": ints("B"),
    },
    reference=reference,
    flops=lambda n: 0,
)
