"""Row-invariant arithmetic for references.

A row of a round must have the same bits whatever the number of rows, its place among them and what
the others hold (`docs/architecture.md`, "Bits"). Three rules give that on a CPU, where vector
width, tails and BLAS kernels otherwise depend on the shape of the whole tensor:

* a product of rows with a weight is made in tiles of `ROW_TILE` rows, so every row meets one and
the same GEMM;
* transcendental functions and row sums are evaluated in float64 and rounded once: a library's
    vector and scalar
  paths agree there to far below a float32 ulp;
* what depends on a length (attention) is split at absolute positions, never at a fraction of the
length.

Every function takes float64 as well and then is the plain formula: that is the oracle.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

#: Rows of one GEMM. Eight is the block of the usual K = 7, and the smallest tile whose kernel
#: treats rows alike.
ROW_TILE: Final = 8


def accumulator(x: Tensor) -> torch.dtype:
    """Dtype in which results of `x` are accumulated and kept unrounded: float64 for float64, else
    float32.
    """
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def matmul_rows(
    x: Tensor, weight: Tensor, *, tiled: bool = True, unrounded: bool = False
) -> Tensor:
    """`x @ weight.T` with float32 accumulation.

    Args:
        x: `[..., I]`, rows.
        weight: `[O, I]`, same dtype as `x`.
        tiled: row-invariant by tiles of `ROW_TILE`; one GEMM over all rows otherwise (prefill).
        unrounded: keep the accumulator's float32 instead of rounding to the dtype of `x`.

    Returns:
        `[..., O]`.
    """
    if unrounded and x.dtype in (torch.bfloat16, torch.float16):
        x, weight = x.float(), weight.float()
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    if not tiled or x.dtype is torch.float64:
        return torch.mm(rows, weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    tiles = -(-count // ROW_TILE)
    # Padded even when whole, so that every tile is read from fresh, equally aligned memory.
    rows = functional.pad(rows, (0, 0, 0, tiles * ROW_TILE - count))
    # The weight stands on the left: on the right, MKL for AVX2 sums the last two rows of a tile of
    # eight in another order than the first six.
    parts = [torch.mm(weight, tile.t()).t() for tile in rows.split(ROW_TILE)]
    product = parts[0] if tiles == 1 else torch.cat(parts)
    return product[:count].reshape(*x.shape[:-1], weight.shape[0]).contiguous()


def mean_square_scale(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(mean(x^2) + eps)` over the last axis, float64, `[..., 1]`."""
    wide = x.double()
    return torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, float64."""
    return 1.0 / (1.0 + torch.exp(-x.double()))


def silu(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, float64."""
    return x.double() * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))` without overflow, float64."""
    wide = x.double()
    return wide.clamp(min=0.0) + torch.log1p(torch.exp(-wide.abs()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Split-half rotary, float64: channels `c` and `c + R` of the first `2 R` turn, the rest pass.

    Args:
        x: `[..., heads, D]`.
        cos, sin: `[..., R]`, shared by the heads.
    """
    half = cos.shape[-1]
    wide, cos, sin = x.double(), cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    low, high, rest = wide.split((half, half, wide.shape[-1] - 2 * half), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)
