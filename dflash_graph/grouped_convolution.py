"""The two-tap dynamic grouped convolution of DFlash2, shared by its input and its output side."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def grouped_convolution(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """`(base[0] + delta[:,0]) x[i] + [i >= 1] (base[1] + delta[:,1]) x[i-1]`, float64 `[B, W, H]`.

    Args:
        x: `[B, W, H]`.
        base: `[2, H]`, by tap.
        delta: `[B, W, 2, G]`, by tap; the channels of a group share a value.
    """
    batch, columns, hidden = x.shape
    groups = delta.shape[-1]
    taps = base.double().reshape(2, groups, hidden // groups) + delta.double().unsqueeze(-1)
    taps = taps.reshape(batch, columns, 2, hidden)
    wide = x.double()
    previous = taps[:, 1:, 1] * wide[:, :-1]
    return taps[:, :, 0] * wide + functional.pad(previous, (0, 0, 1, 0))
