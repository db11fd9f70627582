"""replace_embeddings: given embeddings take the place of chosen columns' token embeddings.

Math:     y[b,i] = given[b,i] if replaced[b,i] else x[b,i]
Shapes:   x, y [B, W, H]; given [B, W, H] float32; replaced [B, W] int32
Numeric:  given is rounded once to the model dtype
Effects:  writes all of y; may take the place of x
Source:   multimodal prompts: a vision tower's output enters before the first layer
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, ints, tensor


def reference(x: Tensor, given: Tensor, replaced: Tensor) -> Tensor:
    return torch.where(replaced.bool().unsqueeze(-1), given.to(x.dtype), x)


OP = Op(
    name="replace_embeddings",
    inputs={
        "x": tensor("B W H"),
        "given": tensor("B W H", "float32"),
        "replaced": ints("B W"),
    },
    outputs={"y": tensor("B W H")},
    reference=reference,
    flops=lambda n: 0,
    in_place={"y": "x"},
)
