"""Generation with times: requests that are followed token by token, and their facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from dflash_graph.cli.output import write

if TYPE_CHECKING:
    from dflash_graph.engine import Engine
    from dflash_graph.options import SamplingParams
    from dflash_graph.request import Generation, Request
    from dflash_graph.submission import Prompt
    from dflash_graph.text import Tokenizer


@dataclass
class Run:
    """A request and when its tokens came, in seconds of one clock."""

    request: Request
    started: float
    first: float | None = None
    last: float = 0.0

    @property
    def first_token_seconds(self) -> float | None:
        """From submission to the first token: waiting and prefill."""
        return None if self.first is None else self.first - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return 0.0 if self.first is None else self.last - self.first

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first: what rounds committed."""
        return max(0, len(self.request.token_ids) - 1)

    @property
    def tokens_per_second(self) -> float:
        """Decoding alone, without prefill; 0.0 where no round ran."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


def submit(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> list[Run]:
    """Queue every prompt, or none where one cannot be served."""
    runs: list[Run] = []
    try:
        for prompt in prompts:
            own = params.replace(seed=(params.seed + len(runs)) % 2**64)
            runs.append(Run(engine.submit(prompt, own), perf_counter()))
    except BaseException:
        cancel(engine, runs)
        raise
    return runs


def follow(engine: Engine, runs: Sequence[Run]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Drive the engine until all runs end; yields (index of the run, its new tokens)."""
    indices = {run.request.id: index for index, run in enumerate(runs)}
    while not all(run.request.is_finished for run in runs):
        events = engine.step()
        now = perf_counter()
        for event in events:
            index = indices[event.request_id]
            if event.token_ids:
                run = runs[index]
                run.first, run.last = run.first or now, now
            yield index, event.token_ids


def cancel(engine: Engine, runs: Sequence[Run]) -> None:
    """End what still runs; what was published stays."""
    for run in runs:
        engine.cancel(run.request)


def facts(run: Run, result: Generation) -> dict[str, Any]:
    """A finished run as JSON-ready values."""
    return {
        "prompt_tokens": len(run.request.prompt),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "error": None if result.error is None else str(result.error),
        "rounds": [
            {
                "proposed": one.proposed,
                "accepted": one.accepted,
                "licensed": one.licensed,
                "committed": one.committed,
            }
            for one in result.rounds
        ],
        "tokens_per_round": result.tokens_per_round,
        "first_token_seconds": run.first_token_seconds,
        "decode_seconds": run.decode_seconds,
        "tokens_per_second": run.tokens_per_second,
    }


class OrderedText:
    """Writes the text of several streams, each whole and in order, the first as it comes.

    Args:
        count: streams.
        tokenizer: what decodes them; None writes token ids.
        is_titled: whether a line stands above each.
    """

    def __init__(self, count: int, tokenizer: Tokenizer | None, *, is_titled: bool) -> None:
        from dflash_graph.text import StreamDecoder

        self._decoders = [StreamDecoder(tokenizer) if tokenizer else None for _ in range(count)]
        self._pending = ["" for _ in range(count)]
        self._begun = [False] * count
        self._ended = [False] * count
        self._is_titled = is_titled
        self._front = 0
        self._last = "\n"
        self._open()

    def feed(self, index: int, token_ids: Sequence[int], *, is_last: bool) -> None:
        """Take the next tokens of a stream, and its end."""
        if self._ended[index]:
            return
        decoder = self._decoders[index]
        if decoder is None:
            piece = "".join(f" {token}" for token in token_ids)[not self._begun[index] :]
            self._begun[index] |= bool(token_ids)
        else:
            piece = decoder.feed(token_ids) + (decoder.flush() if is_last else "")
        self._pending[index] += piece
        self._ended[index] = is_last
        while self._front < len(self._pending):
            piece, self._pending[self._front] = self._pending[self._front], ""
            self._write(piece)
            if not self._ended[self._front]:
                return
            if self._last != "\n":
                self._write("\n")
            self._front += 1
            self._open()

    def _open(self) -> None:
        if self._is_titled and self._front < len(self._pending):
            write(f"--- {self._front + 1} of {len(self._pending)}\n", dim=True)
            self._last = "\n"

    def _write(self, text: str) -> None:
        if text:
            write(text)
            self._last = text[-1]
