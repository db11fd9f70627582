"""Attention of a draft block over its context and itself, as a running softmax in float64.

Bits: neither the batch, a length nor a usual column count enters the shape of a matrix product
(query tiles of `ROW_TILE` columns, block keys padded to `BLOCK_KEYS`, context in steps at absolute
positions), and a step in which a request sees nothing changes no bit of its running sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.arithmetic import ROW_TILE

#: Position of a key that nobody sees.
DEAD: Final = -1
#: The block's own keys are padded to a multiple of this: all of K = 1..15 meet one shape.
BLOCK_KEYS: Final = 16


@dataclass(frozen=True)
class Keys:
    """One step of keys; whatever stands at a dead position (NaN too) reaches no result.

    Args:
        k, v: `[B, P, G, D]`.
        positions: int64 `[B, P]`, absolute; `DEAD` where nothing is visible.
    """

    k: Tensor
    v: Tensor
    positions: Tensor

    def join(self, other: Keys) -> Keys:
        """Both as one step."""
        return Keys(
            torch.cat((self.k, other.k), 1),
            torch.cat((self.v, other.v), 1),
            torch.cat((self.positions, other.positions), 1),
        )


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: Iterable[Keys],
    frontier: Tensor,
    live: Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Attention of the block's columns, at `frontier + i`, over `context` and its live columns.

    Args:
        q: `[B, W, N, D]`; head `h` reads kv head `h // (N / G)`.
        k, v: `[B, W, G, D]`, the block's own.
        context: keys before the block, at least one step; the size of a step depends on no request.
        frontier, live: int32 `[B]`.
        causal: hide keys after the query.
        window: a key is seen iff its distance from the query is below it; None sees all.

    Returns:
        `[B, W, N*D]` in the dtype of `q`, one rounding; zeros in dead columns.
    """
    batch, columns, heads, width = q.shape
    groups = k.shape[2]
    tiles = -(-columns // ROW_TILE)
    # [B, W, N, D] -> [B, G, tiles, N/G, ROW_TILE, D], a matrix for each tile and kv head
    query = functional.pad(q, (0, 0, 0, 0, 0, tiles * ROW_TILE - columns)).double() * width**-0.5
    query = query.reshape(batch, tiles, ROW_TILE, groups, heads // groups, width)
    query = query.permute(0, 3, 1, 4, 2, 5)

    start = frontier.long().unsqueeze(1)
    place = (start + torch.arange(tiles * ROW_TILE, device=q.device)).reshape(
        batch, 1, tiles, 1, ROW_TILE, 1
    )
    own = _own_keys(k, v, start, live.unsqueeze(1))
    softmax = _RunningSoftmax(query)
    for index, step in enumerate(context):
        keys = own.join(step) if index == 0 else step
        positions = keys.positions.reshape(batch, 1, 1, 1, 1, -1)
        visible = positions != DEAD
        if window is not None:
            visible = visible & ((positions - place).abs() < window)
        if causal:
            visible = visible & (positions <= place)
        softmax.fold(keys, visible)

    out = softmax.result().permute(0, 2, 4, 1, 3, 5).reshape(batch, tiles * ROW_TILE, heads * width)
    alive = torch.arange(columns, device=q.device) < live.unsqueeze(1)
    return torch.where(alive.unsqueeze(-1), out[:, :columns], 0.0).to(q.dtype)


def _own_keys(k: Tensor, v: Tensor, start: Tensor, live: Tensor) -> Keys:
    columns = k.shape[1]
    padded = -(-columns // BLOCK_KEYS) * BLOCK_KEYS
    column = torch.arange(padded, device=k.device)
    padding = (0, 0, 0, 0, 0, padded - columns)
    return Keys(
        functional.pad(k, padding),
        functional.pad(v, padding),
        torch.where(column < live, start + column, DEAD),
    )


class _RunningSoftmax:
    """Softmax-weighted values of `query` `[B, G, tiles, N/G, ROW_TILE, D]`, fed step by step."""

    def __init__(self, query: Tensor) -> None:
        self._shape = query.shape
        self._query = query.flatten(3, 4).flatten(0, 2)  # [B*G*tiles, X, D]
        # A finite floor: a row that has seen nothing yet gives exp(-inf) = 0, never inf - inf.
        self._best = query.new_full((*self._query.shape[:2], 1), torch.finfo(query.dtype).min)
        self._total = torch.zeros_like(self._best)
        self._sum = torch.zeros_like(self._query)

    def fold(self, keys: Keys, visible: Tensor) -> None:
        """Take in one step; `visible` broadcasts to `[B, G, tiles, N/G, ROW_TILE, P]`."""
        dead = (keys.positions == DEAD)[..., None, None]
        k = self._matrices(keys.k.double())
        v = self._matrices(keys.v.double().masked_fill(dead, 0.0))
        scores = torch.bmm(self._query, k.mT)  # [B*G*tiles, X, P]
        scores = torch.where(visible, scores.reshape(*self._shape[:5], -1), -torch.inf).reshape(
            scores.shape
        )
        best = torch.maximum(self._best, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - best)
        rescale = torch.exp(self._best - best)
        self._best = best
        self._total = self._total * rescale + weights.sum(-1, keepdim=True)
        self._sum = self._sum * rescale + torch.bmm(weights, v)

    def result(self) -> Tensor:
        return (self._sum / self._total).reshape(self._shape)

    def _matrices(self, x: Tensor) -> Tensor:
        """`[B, P, G, D] -> [B*G*tiles, P, D]`."""
        batch, groups, tiles = self._shape[:3]
        x = x.transpose(1, 2).unsqueeze(2).expand(batch, groups, tiles, -1, -1)
        return x.reshape(-1, *x.shape[3:])
