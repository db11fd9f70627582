"""A kernel that only reads: what a device's memory gives to loads alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(8192)


# Triton reads annotations of kernels as its own; there are none to give.
@triton.jit
def read_kernel(data, out):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(data + at), 0))


def read_all(data: Tensor, out: Tensor) -> None:
    """Read every element of `data` once: int32, a multiple of 8192 of them; one result each."""
    read_kernel[(data.numel() // BLOCK.value,)](data, out, num_warps=8)
