"""Counter-based random numbers: Philox4x32-10, the same bits on every device.

A number is a pure function of the request's seed and of what it decides, so it depends on no
generator's state, on no row and on no batch size. All arithmetic is on int64 tensors that hold
32-bit words and never overflows.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

_WORD: Final = 0xFFFFFFFF
_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
#: Added to the key between rounds: the golden ratio and sqrt(3) - 1.
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)

#: Four words of a counter or of a result.
Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Purpose(IntEnum):
    """What a number decides: the second word of its counter."""

    PREFILL = 0
    PLAIN = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4
    PROPOSAL = 5


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Ten rounds of Philox4x32.

    Args:
        counter, key: int64 tensors of words in `[0, 2^32)`; shapes that broadcast.

    Returns:
        Four int64 tensors of words in `[0, 2^32)`.
    """
    a, b, c, d = counter
    low, high = key
    for _ in range(_ROUNDS):
        (upper_a, lower_a), (upper_c, lower_c) = _multiply(a, 0), _multiply(c, 1)
        a, b, c, d = upper_c ^ b ^ low, lower_c, upper_a ^ d ^ high, lower_a
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d


def uniform(seed: Tensor, position: Tensor, purpose: int, index: Tensor | int = 0) -> Tensor:
    """Numbers `(word0 >> 8) * 2^-24` of the counters `(position, purpose, index, 0)`.

    Args:
        seed: `[B, 2]` int32, the low and the high word of each request's 64-bit seed: the key.
        position: `[B, ...]`, the absolute position of the token that is decided.
        purpose: a `Purpose`.
        index: tells numbers of one position and purpose apart; broadcasts with `position`.

    Returns:
        Float32 in [0, 1), the shape of `position`.
    """
    zero = torch.zeros_like(position, dtype=torch.int64)
    words = (seed.long() & _WORD).reshape(len(seed), *(1,) * (position.dim() - 1), 2)
    counter = ((zero + position) & _WORD, zero + int(purpose), (zero + index) & _WORD, zero)
    word = philox4x32(counter, (words[..., 0], words[..., 1]))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def _multiply(x: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Upper and lower word of the 64-bit product with a multiplier, by halves of `x`."""
    factor = _MULTIPLIERS[side]
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor  # each below 2^48
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD
