"""The gated delta rule over many columns at once: fla-core's kernels, or the same form in torch.

Inside a chunk of C columns, with G the running sum of g and S the state before the chunk
`[Dv, Dk]`, the rule of `dflash_graph.delta_rule` is a triangular system in its updates u:

    (I + A) U = beta (V - exp(G) K S^T),   A[i,j] = beta[i] exp(G[i] - G[j]) (k[i] . k[j]), j < i
    Y = exp(G) Q S^T + P U,                P[i,j] = exp(G[i] - G[j]) (q[i] . k[j]),         j <= i
    S := exp(G[C]) S + U^T (exp(G[C] - G) K)

with k and q normalized and q divided by sqrt(Dk).

What does not depend on S is solved for all chunks together, so only three products a chunk follow
one another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from dflash_graph.delta_rule import NORM_EPS

logger = logging.getLogger(__name__)

#: Columns of a chunk in torch: a triangular system this wide, and one step of the state.
CHUNK: Final = 64
#: fla-core's kernels hold a state of at most this many key channels.
_FLA_KEY_DIM: Final = 256


def scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `n > 0` columns of one request.

    Args:
        q, k: `[n, Hk, Dk]`, before normalization.
        v: `[n, Hv, Dv]`.
        beta, g: `[n, Hv]` float32, write strength and log decay.
        state: `[Hv, Dv, Dk]` float32; not changed.

    Returns:
        y `[n, Hv, Dv]` and the state after the last column. bfloat16 columns on a GPU take
        fla-core's kernels where it is installed: products in bfloat16, sums and state in float32,
        y rounded to bfloat16. Everything else is float32.
    """
    if k.is_cuda and k.dtype is torch.bfloat16 and k.shape[-1] <= _FLA_KEY_DIM:
        kernels = _fla()
        if kernels is not None:
            return _scan_fla(kernels, q, k, v, beta, g, state)
    return scan_chunks(q, k, v, beta, g, state)


def scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`scan` in torch and float32."""
    count, heads, value_dim = v.shape
    group, key_dim = heads // k.shape[1], k.shape[2]
    chunks = -(-count // CHUNK)

    def chunked(x: Tensor) -> Tensor:
        """`[n, Hv, ...]` to `[chunks, Hv, C, ...]`; padding of zeros changes no state."""
        padding = (0, 0) * (x.dim() - 1) + (0, chunks * CHUNK - count)
        return functional.pad(x.float(), padding).unflatten(0, (chunks, CHUNK)).transpose(1, 2)

    key = chunked(_unit(k).repeat_interleave(group, 1))  # [chunks, Hv, C, Dk]
    query = chunked(_unit(q).repeat_interleave(group, 1)) * key_dim**-0.5
    strength = chunked(beta).unsqueeze(-1)  # [chunks, Hv, C, 1]
    # Float64: a decay is the difference of two long sums.
    total = chunked(g).double().cumsum(-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)  # [chunks, Hv, C, C]
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = between.masked_fill_(~seen, float("-inf")).exp_().float()
    until = total.exp().float().unsqueeze(-1)  # [chunks, Hv, C, 1]
    after = decay[:, :, -1, :, None]  # [chunks, Hv, C, 1]

    system = strength * decay * (key @ key.mT)  # the diagonal is taken for ones
    sides = torch.cat((strength * chunked(v), strength * until * key), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, faded = solved.split((value_dim, key_dim), -1)
    own = decay * (query @ key.mT)
    query = query * until
    key = key * after

    outputs = []
    for index in range(chunks):
        update = fresh[index] - faded[index] @ state.mT  # [Hv, C, Dv]
        outputs.append(query[index] @ state.mT + own[index] @ update)
        state = until[index, :, -1:] * state + update.mT @ key[index]
    y = torch.stack(outputs).transpose(1, 2).flatten(0, 1)  # [chunks * C, Hv, Dv]
    return y[:count], state


def _scan_fla(
    kernels: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    # Normalized here and repeated: fla-core tunes its norm for seconds, and its older releases
    # know no grouped value heads. Its state is transposed, [Hv, Dk, Dv].
    group = v.shape[1] // k.shape[1]
    query, key = (_unit(x).to(k.dtype).repeat_interleave(group, 1) for x in (q, k))
    y, after = kernels(
        query.unsqueeze(0),
        key.unsqueeze(0),
        v.unsqueeze(0),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        scale=k.shape[-1] ** -0.5,
        initial_state=state.mT.unsqueeze(0).contiguous(),
        output_final_state=True,
    )
    return y[0], after[0].mT


@cache
def _fla() -> Callable[..., Any] | None:
    """fla-core's chunked kernels, or None where it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        logger.warning(
            "prefill scans Gated DeltaNet layers in torch, which is slower: fla-core cannot be "
            "imported (%s); install dflash-graph[cuda]",
            error,
        )
        return None
    kernels: Callable[..., Any] = chunk_gated_delta_rule
    return kernels


def _unit(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, float32."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + NORM_EPS)
