"""rules: ops of a prefill chunk as calls of torch's own kernels, float32 between load and store.

A rule takes a chunk, then the op's arguments, outputs and attributes by name. It computes the live
columns and leaves the dead ones of its result as they were: no rule looks at them. Only attention
and the scan, whose contracts promise it, fill them with zeros. None looks at the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from dflash_graph import head
from dflash_graph.lowering.gdn_chunks import scan

#: Rows of a head that are widened to float32 at once where a product cannot give float32 itself.
_WIDENED_ROWS: Final = 16384


@dataclass
class Chunk:
    """Where one request's columns lie, as numbers on the host.

    Args:
        start: position of column 0.
        live: live columns.
        slot: the request's slot.
    """

    start: int = 0
    live: int = 0
    slot: int = 0

    def of(self, x: Tensor) -> Tensor:
        """The live columns of `[1, W, ...]`, as `[live, ...]`."""
        return x[0, : self.live]

    def positions(self, device: torch.device, skip: int = 0) -> Tensor:
        """Positions of the live columns from column `skip` on, int64."""
        return torch.arange(self.start + skip, self.start + self.live, device=device)


def _embedding(chunk: Chunk, ids: Tensor, table: Tensor, *, x: Tensor, scale: float) -> None:
    rows = table.index_select(0, chunk.of(ids))
    chunk.of(x).copy_(rows if scale == 1.0 else rows.float() * scale)


def _replace_embeddings(
    chunk: Chunk, x: Tensor, given: Tensor, replaced: Tensor, *, y: Tensor
) -> None:
    chosen = chunk.of(replaced).bool().unsqueeze(-1)
    chunk.of(y).copy_(torch.where(chosen, chunk.of(given).to(x.dtype), chunk.of(x)))


def _rotary_table(
    chunk: Chunk,
    positions: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    rotary_half: int,
    theta: float,
    sections: tuple[int, ...],
) -> None:
    # Float64, as in the reference: a float32 angle is too coarse at a far position.
    channel = torch.arange(rotary_half, device=positions.device)
    inverse = theta ** (-channel.double() / rotary_half)
    angles = positions[:, 0, : chunk.live, None] * inverse  # [A, live, rotary_half]
    angle = angles[0]
    for axis in range(1, len(sections)):
        turned = (channel % 3 == axis) & (channel < 3 * sections[axis])
        angle = torch.where(turned, angles[axis], angle)
    chunk.of(cos).copy_(angle.cos())
    chunk.of(sin).copy_(angle.sin())


def _linear(chunk: Chunk, x: Tensor, weight: Tensor, *, y: Tensor, tiled: bool) -> None:
    torch.mm(chunk.of(x), weight.t(), out=chunk.of(y))


def _residual_add(chunk: Chunk, x: Tensor, y: Tensor, *, out: Tensor) -> None:
    torch.add(chunk.of(x), chunk.of(y), out=chunk.of(out))


def _rms_norm(
    chunk: Chunk, x: Tensor, weight: Tensor, *, y: Tensor, eps: float, offset: bool
) -> None:
    chunk.of(y).copy_(_normed(chunk.of(x), weight, eps, offset))


def _swiglu(chunk: Chunk, gate_up: Tensor, *, y: Tensor, ffn_width: int) -> None:
    gate, up = chunk.of(gate_up).split(ffn_width, -1)
    torch.mul(functional.silu(gate.float()), up, out=chunk.of(y))


def _head_norm_rope(
    chunk: Chunk,
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_parts: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
    offset: bool,
) -> None:
    kv_width = kv_heads * head_dim
    parts = chunk.of(qkv).split((query_parts * q_heads * head_dim, kv_width, kv_width), -1)
    queries = parts[0].unflatten(-1, (q_heads, query_parts, head_dim))[:, :, 0]
    keys, values = (part.unflatten(-1, (kv_heads, head_dim)) for part in parts[1:])
    for place, x, norm in ((q, queries, q_norm), (k, keys, k_norm)):
        _turn(chunk.of(place), _normed(x, norm, eps, offset), chunk.of(cos), chunk.of(sin))
    chunk.of(v).copy_(values)


def _append_kv(
    chunk: Chunk,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
) -> None:
    page_size = k_pages.shape[2]
    position = chunk.positions(k.device)
    page = page_table[0].long()[position // page_size]
    for pages, block in ((k_pages, k), (v_pages, v)):
        pages[page, :, position % page_size] = chunk.of(block)


def _paged_attention(
    chunk: Chunk,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    start: Tensor,
    live: Tensor,
    *,
    o: Tensor,
) -> None:
    o[0, chunk.live :] = 0.0
    if not chunk.live:
        return
    end, page_size = chunk.start + chunk.live, k_pages.shape[2]
    table = page_table[0, : -(-end // page_size)]

    def gathered(pages: Tensor) -> Tensor:
        """Positions [0, end) of the request's pages, `[1, G, end, D]`."""
        return pages.index_select(0, table).transpose(0, 1).flatten(1, 2)[None, :, :end]

    query = chunk.of(q).transpose(0, 1).unsqueeze(0)  # [1, N, live, D]
    keys, values = gathered(k_pages), gathered(v_pages)
    if q.dtype is torch.float32:
        # The float32 kernel knows no groups.
        group = q.shape[2] // k_pages.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    mask = causal_lower_right(chunk.live, end)
    grouped = query.shape[1] != keys.shape[1]
    result = functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=grouped)
    chunk.of(o).unflatten(-1, q.shape[2:]).copy_(result[0].transpose(0, 1))


def _attention_gate(
    chunk: Chunk, o: Tensor, qkv: Tensor, *, y: Tensor, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    queries = chunk.of(qkv)[:, : 2 * q_heads * head_dim]
    gate = queries.unflatten(-1, (q_heads, 2, head_dim))[:, :, 1]  # [live, N, D]
    x, out = (chunk.of(t).unflatten(-1, (q_heads, head_dim)) for t in (o, y))
    torch.mul(x, torch.sigmoid(gate.float()), out=out)


def _gdn_conv(
    chunk: Chunk,
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    slots: Tensor,
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    value_dim: int,
) -> None:
    stream = torch.cat((history[chunk.slot], chunk.of(x))).float()  # [taps-1 + live, C]
    first, *taps = weight.float().unbind(1)
    total = stream[: chunk.live] * first
    for index, tap in enumerate(taps, 1):
        total.addcmul_(stream[index : index + chunk.live], tap)
    keys, values = key_heads * key_dim, value_heads * value_dim
    parts = functional.silu(total).split((keys, keys, values), -1)
    for place, part in zip((q, k, v), parts, strict=True):
        chunk.of(place).flatten(1).copy_(part)


def _gdn_gates(
    chunk: Chunk,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    beta: Tensor,
    g: Tensor,
    value_heads: int,
) -> None:
    b, a = chunk.of(ba).float().split(value_heads, -1)
    torch.sigmoid(b, out=chunk.of(beta))
    torch.mul(functional.softplus(a + dt_bias), -a_log.exp(), out=chunk.of(g))


def _gdn_scan(
    chunk: Chunk,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
    slots: Tensor,
    live: Tensor,
    *,
    y: Tensor,
) -> None:
    y[0, chunk.live :] = 0.0
    if chunk.live:
        outputs, after = scan(
            chunk.of(q), chunk.of(k), chunk.of(v), chunk.of(beta), chunk.of(g), state[chunk.slot]
        )
        chunk.of(y).copy_(outputs)
        state[chunk.slot].copy_(after)


def _gated_norm(
    chunk: Chunk,
    y: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    out: Tensor,
    value_heads: int,
    value_dim: int,
    eps: float,
) -> None:
    normed = _normed(chunk.of(y), weight, eps, offset=False).flatten(-2)
    torch.mul(normed, functional.silu(chunk.of(z).float()), out=chunk.of(out))


def _conv_history_commit(
    chunk: Chunk, columns: Tensor, history: Tensor, slots: Tensor, committed: Tensor
) -> None:
    depth = history.shape[1]
    last = chunk.of(columns)[-depth:]
    history[chunk.slot] = torch.cat((history[chunk.slot], last))[-depth:]


def _stage_hidden(
    chunk: Chunk, hidden: Tensor, continuation: Tensor, slots: Tensor, committed: Tensor
) -> None:
    if chunk.live:
        continuation[chunk.slot] = hidden[0, chunk.live - 1]


def _join_features(chunk: Chunk, features: Sequence[Tensor], *, out: Tensor, blocks: int) -> None:
    for part, place in zip(features, chunk.of(out).chunk(blocks, -1), strict=True):
        place.copy_(chunk.of(part))


def _context_kv(
    chunk: Chunk,
    c: Tensor,
    weight: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    kv_heads: int,
    head_dim: int,
    rotary_half: int,
    eps: float,
    tiled: bool,
) -> None:
    projected = _product(chunk.of(c), weight).unflatten(-1, (2, kv_heads, head_dim))
    keys = _normed(projected[:, 0], k_norm, eps, offset=False)
    _turn(chunk.of(k), keys, chunk.of(cos), chunk.of(sin))
    chunk.of(v).copy_(projected[:, 1])


def _ring_append(
    chunk: Chunk,
    k: Tensor,
    v: Tensor,
    k_ring: Tensor,
    v_ring: Tensor,
    slots: Tensor,
    start: Tensor,
    live: Tensor,
) -> None:
    window = k_ring.shape[1]
    skip = max(chunk.live - window, 0)
    place = chunk.positions(k.device, skip) % window
    for ring, block in ((k_ring, k), (v_ring, v)):
        ring[chunk.slot].index_copy_(0, place, chunk.of(block)[skip:])


def _head_scores(
    chunk: Chunk,
    x: Tensor,
    weight: Tensor,
    *,
    scores: Tensor,
    multiplier: float,
    softcap: float,
    tiled: bool,
) -> None:
    chunk.of(scores).copy_(_scores(chunk.of(x), weight, multiplier, softcap))


def _head_argmax(
    chunk: Chunk,
    x: Tensor,
    weight: Tensor,
    *,
    ids: Tensor,
    scores: Tensor,
    skip: int,
    public_vocab: int,
    multiplier: float,
    softcap: float,
) -> None:
    every = _scores(chunk.of(x)[skip:], weight[:public_vocab], multiplier, softcap)
    chosen = head.lowest_argmax(every)
    best = every.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    ids[0, : len(chosen)] = chosen
    scores[0, : len(chosen)] = torch.where(every.isnan().any(-1), torch.nan, best)


#: The rule of each op that has one.
RULES: Final[Mapping[str, Callable[..., None]]] = {
    "append_kv": _append_kv,
    "attention_gate": _attention_gate,
    "context_kv": _context_kv,
    "conv_history_commit": _conv_history_commit,
    "embedding": _embedding,
    "gated_norm": _gated_norm,
    "gdn_conv": _gdn_conv,
    "gdn_gates": _gdn_gates,
    "gdn_scan": _gdn_scan,
    "head_argmax": _head_argmax,
    "head_norm_rope": _head_norm_rope,
    "head_scores": _head_scores,
    "join_features": _join_features,
    "linear": _linear,
    "paged_attention": _paged_attention,
    "replace_embeddings": _replace_embeddings,
    "residual_add": _residual_add,
    "ring_append": _ring_append,
    "rms_norm": _rms_norm,
    "rotary_table": _rotary_table,
    "stage_hidden": _stage_hidden,
    "swiglu": _swiglu,
}


def _normed(x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
    """`rms_norm` over the last axis, float32 and not rounded."""
    scale = weight.float() + 1.0 if offset else weight.float()
    return functional.rms_norm(x.float(), scale.shape, scale, eps)


def _turn(place: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Split-half rotary of float32 heads `[live, heads, D]`, rounded into `place`."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    low, high = x[..., :half], x[..., half : 2 * half]
    place[..., :half] = low * cos - high * sin
    place[..., half : 2 * half] = high * cos + low * sin
    place[..., 2 * half :] = x[..., 2 * half :]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in float32: sums that are never rounded to the model dtype."""
    if x.dtype is torch.float32:
        return torch.mm(x, weight.t())
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    wide = x.float()
    return torch.cat([torch.mm(wide, w.float().t()) for w in weight.split(_WIDENED_ROWS)], -1)


def _scores(x: Tensor, weight: Tensor, multiplier: float, softcap: float) -> Tensor:
    """Head scores of rows `[rows, H]`, float32."""
    scores = _product(x, weight)
    if multiplier != 1.0:
        scores = scores * multiplier
    return softcap * torch.tanh(scores / softcap) if softcap > 0.0 else scores
