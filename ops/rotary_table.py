"""rotary_table: cosines and sines of rotary angles, for scalar or three-axis (mRoPE) positions.

Math:     angle[b,i,c] = positions[axis(c),b,i] * theta^(-c / rotary_half)
          axis(c) = c % 3 if c < 3 * sections[c % 3] else 0;  0 without sections
Shapes:   positions [A, B, W] int32, A = 1 without sections, A = 3 with;
          cos, sin [B, W, rotary_half] float32
Numeric:  float64, rounded once to float32; row-invariant
Effects:  writes all of cos and sin
Raises:   ShapeError if A does not fit `sections`, or these are not three that sum to rotary_half
Source:   spec "The target" (rotary, mRoPE sections interleaved), "The drafts" (scalar positions)
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_graph.op import Op, Sizes, ints, tensor


def reference(
    positions: Tensor, *, rotary_half: int, theta: float, sections: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    channel = torch.arange(rotary_half, dtype=torch.float64, device=positions.device)
    inverse = theta ** (-channel / rotary_half)
    angle = positions.double()[..., None] * inverse  # [A, B, W, rotary_half]
    if sections:
        axes = torch.tensor(_axes(rotary_half, sections), device=positions.device)
        angle = angle.gather(0, axes.expand(1, *angle.shape[1:]))
    angle = angle[0]
    return angle.cos().float(), angle.sin().float()


def _axes(rotary_half: int, sections: tuple[int, ...]) -> list[int]:
    """The position axis of every channel."""
    return [c % 3 if c < 3 * sections[c % 3] else 0 for c in range(rotary_half)]


def _check(n: Sizes) -> str | None:
    if not n.sections:
        return None if n.A == 1 else f"positions must have 1 axis without sections, got {n.A}"
    if len(n.sections) != 3 or min(n.sections) < 0 or sum(n.sections) != n.rotary_half:
        return f"sections must be three that sum to rotary_half = {n.rotary_half}, got {n.sections}"
    return None if n.A == 3 else f"positions must have 3 axes with sections, got {n.A}"


OP = Op(
    name="rotary_table",
    inputs={"positions": ints("A B W")},
    outputs={
        "cos": tensor("B W rotary_half", "float32"),
        "sin": tensor("B W rotary_half", "float32"),
    },
    attributes={"rotary_half": int, "theta": float, "sections": tuple},
    reference=reference,
    flops=lambda n: 3 * n.B * n.W * n.rotary_half,
    check=_check,
)
