"""verify_ids: the target's input block, the anchor and then the live drafts.

Math:     ids[b] = [a, d_1 .. d_P, a, ..., a] with a = anchor[b], P = live_drafts[b]
Shapes:   anchor, live_drafts [B] int32; drafts [B, K] int32; ids [B, K+1] int32
Numeric:  exact
Effects:  writes all of ids; drafts past P are not looked at
Source:   spec "The round" (Verify)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, ints


def reference(anchor: Tensor, drafts: Tensor, live_drafts: Tensor) -> Tensor:
    column = torch.arange(drafts.shape[1], device=drafts.device)
    first = anchor.unsqueeze(1)
    return torch.cat((first, torch.where(column < live_drafts.unsqueeze(1), drafts, first)), 1)


OP = Op(
    name="verify_ids",
    inputs={"anchor": ints("B"), "drafts": ints("B K"), "live_drafts": ints("B")},
    outputs={"ids": ints("B K+1")},
    reference=reference,
    flops=lambda n: 0,
)
