"""join_features: the draft's context input from the features of its target blocks.

Math:     out[b,i] = concat(features[0][b,i], features[1][b,i], ...)
Shapes:   features: `blocks` tensors [B, W, H], in recorded order; out [B, W, blocks*H]
Numeric:  exact copies
Effects:  writes all of out
Raises:   ShapeError if the number of features is not `blocks`
Source:   spec "The drafts" (Context: s_t)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_graph.op import Op, tensor


def reference(features: Sequence[Tensor], *, blocks: int) -> Tensor:
    return torch.cat(tuple(features), -1)


OP = Op(
    name="join_features",
    inputs={"features": tensor("B W H", many="blocks")},
    outputs={"out": tensor("B W blocks*H")},
    attributes={"blocks": int},
    reference=reference,
    flops=lambda n: 0,
)
