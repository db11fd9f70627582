"""request: what a caller holds of a request, and the engine's bookkeeping of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_graph.contexts import Checkpoint
from dflash_graph.errors import DFlashGraphError
from dflash_graph.options import SamplingParams
from dflash_graph.statistics import FinishReason, RoundRecord, Statistics
from dflash_graph.stop_text import StopText
from dflash_graph.submission import Media

#: A frontend's own choice of N: given the licensed tokens, how many of them to keep (0 ends the
#: request).
Preview = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class Event:
    """Tokens of one request that were just committed; the last event of a request has its finish
    reason.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Generation:
    """Result of a request.

    Args:
        token_ids: published tokens, without the prompt.
        finish_reason: ``"stop"`` (an end or stop token, or a preview that ended it), ``"length"``
            (budget or capacity), ``"cancelled"`` or ``"error"``.
        rounds: one record a round.
        text: decoded tokens, where the engine has a tokenizer.
        error: what went wrong, for ``"error"``.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    rounds: tuple[RoundRecord, ...]
    text: str | None = None
    error: DFlashGraphError | None = None

    @property
    def tokens_per_round(self) -> float:
        """Tokens committed by rounds over rounds; 0.0 before the first."""
        return self.statistics.tokens_per_round

    @property
    def statistics(self) -> Statistics:
        """Counts over its rounds."""
        return Statistics.of(self.rounds)


@dataclass(eq=False)
class Request:
    """A submitted request: handle of the caller, record of the engine. Callers read it and change
    nothing.

    Args:
        id: number within its engine, in order of submission.
        prompt: prompt ids; of a continued context, the tokens that were processed before.
        params: sampling parameters.
        stops: ids at which it stops.
        budget: tokens it may generate: `max_new_tokens`, or less where the capacity ends first.
        preview: a frontend's own choice of N.
        source: the context it continues, or None.
        media: embeddings and positions of a multimodal prompt, or None.
        stop_text: its stop strings over its text, or None.
        keep: whether a checkpoint is to be taken when it ends.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    budget: int
    preview: Preview | None = None
    source: Checkpoint | None = None
    media: Media | None = None
    stop_text: StopText | None = None
    keep: bool = False
    #: Published tokens.
    token_ids: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DFlashGraphError | None = None
    #: Its context when it ended, where `keep` asked for it and it ended whole.
    checkpoint: Checkpoint | None = None

    # What the model holds of it.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    #: Tokens by position as far as they are known: prompt, then everything generated and committed.
    history: list[int] = field(default_factory=list)
    #: F: positions the target has processed; during prefill, prompt tokens so far.
    frontier: int = 0
    #: Positions that are draft context; the columns from here to the frontier are pending.
    context_frontier: int = 0
    #: Prompt tokens that came from a stored prefix.
    reused: int = 0

    #: Tokens of its history that it did not generate itself.
    given: int = field(init=False)
    #: Whether the argmax of unchanged scores decides.
    is_plain_greedy: bool = field(init=False)

    #: A row of a page table as it was last asked for, and the pages in it.
    _table: np.ndarray | None = field(default=None, init=False, repr=False)
    _tabled: list[int] = field(default_factory=list, init=False, repr=False)
    _count: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.history = list(self.prompt)
        if self.source is not None:
            self.history.append(self.source.anchor)
        self.given = len(self.history)
        p = self.params
        unchanged = p.presence_penalty == 0.0 and p.frequency_penalty == 0.0
        self.is_plain_greedy = p.is_greedy and unchanged

    def page_table(self, capacity: int) -> np.ndarray:
        """Its row of a page table, int32 `[capacity]`, padded with -1; not to be written to.

        The row is kept and goes on with the list of pages: making a long one takes long.
        """
        if self._table is None or self._tabled is not self.pages or self._count > len(self.pages):
            self._table = np.full(capacity, -1, dtype=np.int32)
            self._tabled, self._count = self.pages, 0
        if self._count < len(self.pages):
            self._table[self._count : len(self.pages)] = self.pages[self._count :]
            self._count = len(self.pages)
        return self._table

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_admitted(self) -> bool:
        return self.slot >= 0

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt tokens, or the choice of the first token, are still to come."""
        return self.finish_reason is None and len(self.history) == len(self.prompt)

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is processed and its anchor chosen."""
        return self.finish_reason is None and len(self.history) > len(self.prompt)

    @property
    def anchor(self) -> int:
        """The last token, chosen but not processed."""
        return self.history[-1]

    @property
    def generated(self) -> tuple[int, ...]:
        """Every token generated so far, in the contexts it continues too; what penalties count."""
        before = self.source.generated if self.source is not None else ()
        return (*before, *self.history[self.given :])

    @property
    def remaining(self) -> int:
        """Tokens left of its budget."""
        return self.budget - (len(self.history) - self.given)

    @property
    def pending(self) -> int:
        """Committed columns whose features are not yet draft context."""
        return self.frontier - self.context_frontier

    @property
    def is_multimodal(self) -> bool:
        """Whether its prompt, or that of the context it continues, was more than tokens."""
        return self.media is not None or (self.source is not None and self.source.is_multimodal)

    @property
    def rope_delta(self) -> int:
        """Rotary position of a generated token, less its index."""
        if self.media is not None:
            return self.media.rope_delta
        return self.source.rope_delta if self.source is not None else 0
