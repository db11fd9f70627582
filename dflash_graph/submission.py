"""submission: what a caller asks for, checked before anything of it is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dflash_graph.errors import RequestError
from dflash_graph.options import SamplingParams
from dflash_graph.text import Tokenizer

Prompt = str | Sequence[int]

#: Largest rotary position of a prompt: positions are int32, and generated tokens go on from there.
_POSITION_MAX: Final = 2**30 - 1
_POSITION_DTYPES: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Media:
    """The multimodal part of a prompt.

    Args:
        embeddings: embedding `[H]` of each prompt position that has one of its own; float32, on
            the host, copies that nobody else holds.
        positions: rotary positions `[3, T]` of the prompt, int64, on the host.
    """

    embeddings: Mapping[int, Tensor]
    positions: Tensor

    @property
    def rope_delta(self) -> int:
        """Rotary position of the first token after the prompt, less its index."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]


def checked_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab: int, capacity: int
) -> tuple[int, ...]:
    """Token ids of a prompt.

    Raises:
        RequestError: it is empty, too long, no prompt at all, or has ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "prompt: expected token ids (the target has no tokenizer.json), got text"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"prompt: expected text of whole characters, got {prompt[error.start]!r} "
                f"(half of one) at {error.start}"
            ) from None
        prompt = tokenizer.encode(prompt)
    if isinstance(prompt, bytes | Mapping | Set) or not isinstance(prompt, Iterable):
        raise RequestError(f"prompt: expected token ids or text, got {prompt!r}")
    ids = tuple(prompt)
    if not ids:
        raise RequestError("prompt: expected at least one token, got none")
    if len(ids) >= capacity:
        raise RequestError(
            f"prompt: expected fewer than {capacity} tokens (max_context), got {len(ids)}"
        )
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError(f"prompt[{index}]: expected an id in 0..{vocab - 1}, got {token!r}")
    return ids


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab: int) -> None:
    """Raise RequestError if the engine cannot serve `params`."""
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params: expected SamplingParams, got {params!r}")
    for token in params.stop_token_ids:
        if token >= vocab:
            raise RequestError(
                f"stop_token_ids: expected ids below {vocab} (the vocabulary), got {token}"
            )
    if params.stop and tokenizer is None:
        raise RequestError(
            "stop: expected no stop strings (the target has no tokenizer.json), "
            f"got {params.stop!r}; use stop_token_ids"
        )


def check_preview(preview: object) -> None:
    """Raise RequestError unless a preview is None or can be called."""
    if not (preview is None or callable(preview)):
        raise RequestError(f"preview: expected a function of the licensed tokens, got {preview!r}")


def checked_media(
    embeddings: Mapping[int, Tensor] | None, positions: Any, tokens: int, hidden: int
) -> Media | None:
    """The multimodal part of a prompt of `tokens` tokens, or None where there is none.

    Args:
        embeddings: embedding `[H]` by prompt position, or None.
        positions: `[3, tokens]` integers, or None for plain text positions.

    Raises:
        RequestError: a position is outside the prompt, a shape differs, or a value is not finite.
    """
    if embeddings is None and positions is None:
        return None
    given = {} if embeddings is None else embeddings
    if not isinstance(given, Mapping):
        raise RequestError(
            f"embeddings: expected a mapping of prompt positions, got {type(given).__name__}"
        )
    rows = {index: _checked_row(index, row, tokens, hidden) for index, row in given.items()}
    if positions is None:
        return Media(rows, torch.arange(tokens).expand(3, tokens).clone())
    return Media(rows, _checked_positions(positions, tokens))


def _checked_row(index: Any, row: Any, tokens: int, hidden: int) -> Tensor:
    """A copy of one embedding."""
    if type(index) is not int or not 0 <= index < tokens:
        raise RequestError(f"embeddings: expected prompt positions 0..{tokens - 1}, got {index!r}")
    if not isinstance(row, Tensor) or tuple(row.shape) != (hidden,):
        found = list(row.shape) if isinstance(row, Tensor) else type(row).__name__
        raise RequestError(f"embeddings[{index}]: expected a tensor [{hidden}], got {found}")
    if not row.is_floating_point():
        raise RequestError(f"embeddings[{index}]: expected floating-point values, got {row.dtype}")
    copy = row.detach().to(device="cpu", dtype=torch.float32, copy=True)
    if not bool(torch.isfinite(copy).all()):
        raise RequestError(f"embeddings[{index}]: expected values that are finite in float32")
    return copy


def _checked_positions(positions: Any, tokens: int) -> Tensor:
    expected = f"positions: expected integers [3, {tokens}] (three axes of the prompt)"
    try:
        rows = torch.as_tensor(positions).cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RequestError(f"{expected}, got {error}") from None
    if tuple(rows.shape) != (3, tokens) or rows.dtype not in _POSITION_DTYPES:
        raise RequestError(f"{expected}, got {rows.dtype} {list(rows.shape)}")
    rows = rows.to(torch.int64, copy=True)
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high > _POSITION_MAX:
        raise RequestError(f"positions: expected values 0..{_POSITION_MAX}, got {low}..{high}")
    return rows
