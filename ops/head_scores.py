"""head_scores: scores of the output head, never rounded to the model dtype.

Math:     s = multiplier * (x weight^T);  s = softcap * tanh(s / softcap) if softcap > 0
Shapes:   x [B, W, H]; weight [V, H]; scores [B, W, V] float32
Numeric:  float32 accumulation; multiplier and softcap unrounded in between; row-invariant if
          `tiled`
Effects:  writes all of scores
Raises:   ShapeError if softcap is negative
Source:   spec "The drafts" (output_multiplier, final_logit_softcapping), "Sampling and
          verification"
"""

from __future__ import annotations

from torch import Tensor

from dflash_graph import head
from dflash_graph.op import Op, tensor, weight


def reference(
    x: Tensor, weight: Tensor, *, multiplier: float, softcap: float, tiled: bool
) -> Tensor:
    return head.head_scores(x, weight, multiplier=multiplier, softcap=softcap, tiled=tiled)


OP = Op(
    name="head_scores",
    inputs={"x": tensor("B W H"), "weight": weight("V H")},
    outputs={"scores": tensor("B W V", "float32")},
    attributes={"multiplier": float, "softcap": float, "tiled": bool},
    reference=reference,
    flops=lambda n: 2 * n.B * n.W * n.V * n.H,
    check=lambda n: (
        None if n.softcap >= 0.0 else f"softcap must be 0 (off) or positive, got {n.softcap}"
    ),
)
