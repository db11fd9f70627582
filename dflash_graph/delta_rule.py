"""The gated delta rule, column by column: the one arithmetic of verify, fold and prefill.

Per value head, with the state S `[Dv, Dk]` in float32 (spec, "The target"):

    S := exp(g) S;   u = beta / |k| (v - S k / |k|);   S := S + u k^T;   y = S q / |q| / sqrt(Dk)

with `|x| = sqrt(sum(x^2) + 1e-6)`; value head h reads key head `h // (Hv / Hk)`. All that does not
depend on S is evaluated in float64 for the whole block and rounded once; a step is four products of
one shape per head. So the bits of a column depend on the columns before it and on nothing else, and
a state that was stored after a column and loaded again goes on with the same bits. The correction u
is all that a column's update takes from v, beta and the state: who kept it can replay the update.

Every function takes float64 as well and then is the plain formula: that is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

NORM_EPS: Final = 1e-6


class Column(NamedTuple):
    """What one column brings to the `heads = B * Hv` states of a block."""

    decay: Tensor  # [heads, 1, 1], exp(g)
    k: Tensor  # [heads, 1, Dk]
    unit_k: Tensor  # [heads, Dk, 1], normalized
    v: Tensor  # [heads, Dv, 1]
    strength: Tensor  # [heads, 1, 1], beta / |k|
    q: Tensor | None  # [heads, Dk, 1], normalized and divided by sqrt(Dk)


def delta_rule_step(states: Tensor, column: Column, y: Tensor | None = None) -> Tensor:
    """Advance the states by one column; returns its correction u, `[heads, Dv, 1]`.

    Args:
        states: `[heads, Dv, Dk]`, changed in place.
        column: the column's inputs; its `q` may be None if `y` is.
        y: `[heads, Dv, 1]`, takes the outputs if given.
    """
    states.mul_(column.decay)
    u = torch.baddbmm(column.v, states, column.unit_k, alpha=-1.0).mul_(column.strength)
    states.baddbmm_(u, column.k)
    if y is not None:
        assert column.q is not None, "an output needs a query"
        torch.bmm(states, column.q, out=y)
    return u


def delta_rule(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    slots: Tensor,
    counts: Tensor,
    *,
    q: Tensor | None = None,
    store: bool,
    corrections: Tensor | None = None,
) -> Tensor | None:
    """Run the first `counts[b]` columns of every request from its state.

    Args:
        k: `[B, W, Hk, Dk]`, before normalization; `q` likewise, or None if no outputs are needed.
        v: `[B, W, Hv, Dv]`.
        beta: `[B, W, Hv]`, dtype of `state`; `g` likewise.
        state: `[slots, Hv, Dv, Dk]`, float32 (float64 in an oracle).
        slots: `[B]` int32, every request's place in `state`.
        counts: `[B]` int32.
        store: leave the state after the last of its columns in `state`; a request with count 0
            keeps its bytes.
        corrections: `[B, W, Hv, Dv]`, takes u of those columns, zeros of the others.

    Returns:
        `[B, W, Hv, Dv]`, dtype of `state`, zeros from column `counts[b]` on; None without `q`.
    """
    batch, width, heads, value_dim = v.shape
    places, ends = slots.tolist(), counts.tolist()
    states = _paired(torch.cat([state[place] for place in places]))
    ys = None
    if q is not None:
        ys = states.new_empty(width, states.shape[0], value_dim, 1)
    if corrections is not None:
        corrections.zero_()
    for index, column in enumerate(block_columns(k, v, beta, g, q, state.dtype)[: max(ends)]):
        u = delta_rule_step(states, column, None if ys is None else ys[index])
        if corrections is not None:
            of_request = u[: batch * heads].view(batch, heads, value_dim)
            for request, end in enumerate(ends):
                if index < end:
                    corrections[request, index] = of_request[request]
        if store:
            _store_ended(states, state, places, ends, index)
    if ys is None:
        return None
    y = ys[:, : batch * heads].reshape(width, batch, heads, value_dim).transpose(0, 1).contiguous()
    for request, end in enumerate(ends):
        if end < width:
            y[request, end:] = 0.0
    return y


def replay(
    k: Tensor, corrections: Tensor, g: Tensor, state: Tensor, slots: Tensor, counts: Tensor
) -> None:
    """Advance states by the first `counts[b]` columns of every request, from their corrections.

    Leaves the bits that `delta_rule` stores after the same columns.

    Args:
        k: `[B, W, Hk, Dk]`, before normalization.
        corrections: `[B, W, Hv, Dv]`, dtype of `state`, as `delta_rule` gave them.
        g, state, slots, counts: as for `delta_rule`.
    """
    columns = block_columns(k, corrections, torch.zeros_like(g), g, None, state.dtype)
    places, ends = slots.tolist(), counts.tolist()
    states = _paired(torch.cat([state[place] for place in places]))
    for index, column in enumerate(columns[: max(ends)]):
        states.mul_(column.decay).baddbmm_(column.v, column.k)
        _store_ended(states, state, places, ends, index)


def _store_ended(
    states: Tensor, state: Tensor, places: Sequence[int], ends: Sequence[int], index: int
) -> None:
    """Keep the states of the requests whose last column is `index`."""
    heads = state.shape[1]
    for request, end in enumerate(ends):
        if end == index + 1:
            state[places[request]] = states[request * heads : (request + 1) * heads]


def column_flops(key_heads: int, heads: int, key_dim: int, value_dim: int, *, outputs: bool) -> int:
    """Floating-point operations of one column of one request, with or without outputs."""
    norms = key_heads * (3 * key_dim + 2)
    # exp(g), decay, S k, u, u k^T
    step = heads * (2 + 5 * value_dim * key_dim + 2 * value_dim)
    if not outputs:
        return norms + step
    return 2 * norms + step + heads * (2 * value_dim * key_dim + value_dim)


def block_columns(
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor, q: Tensor | None, dtype: torch.dtype
) -> list[Column]:
    """The columns of a block, with all evaluated that does not depend on a state.

    Args:
        k, v, beta, g, q: as for `delta_rule`.
        dtype: dtype of the states.
    """
    batch, width, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]

    def unbound(x: Tensor, *shape: int) -> tuple[Tensor, ...]:
        """`[B, W, Hv, ...]` to W contiguous tensors `[B * Hv, *shape]`."""
        x = x.to(dtype).transpose(0, 1).reshape(width, batch * heads, *shape)
        return _paired(x, dim=1).unbind()

    wide = (k if q is None else torch.cat((k, q), dim=2)).double()
    inverse = torch.rsqrt((wide * wide).sum(-1) + NORM_EPS)
    unit = wide * inverse[..., None]
    unit = unit.view(batch, width, -1, key_heads, 1, key_dim)
    unit = unit.expand(-1, -1, -1, -1, heads // key_heads, -1)
    unit = unit.reshape(batch, width, -1, heads, key_dim)  # k first, then q
    unit_k = unit[:, :, 0]
    qs: tuple[Tensor | None, ...] = (None,) * width
    if q is not None:
        qs = unbound(unit[:, :, 1] * key_dim**-0.5, key_dim, 1)
    per_head = heads // key_heads
    inverse_k = inverse[:, :, :key_heads].repeat_interleave(per_head, 2)
    parts = (
        unbound(torch.exp(g.double()), 1, 1),
        unbound(k.repeat_interleave(per_head, 2), 1, key_dim),
        unbound(unit_k, key_dim, 1),
        unbound(v, value_dim, 1),
        unbound(beta.double() * inverse_k, 1, 1),
        qs,
    )
    return [Column(*column) for column in zip(*parts, strict=True)]


def _paired(x: Tensor, dim: int = 0) -> Tensor:
    """`x`, doubled along `dim` where that has one entry: BLAS computes a batch of one otherwise."""
    return x.repeat_interleave(2, dim=dim) if x.shape[dim] == 1 else x
