"""request: what a caller holds of a request, and the engine's bookkeeping of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dflash_graph.errors import DFlashGraphError
from dflash_graph.options import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]

#: A frontend's own choice of N: given the licensed tokens, how many of them to keep (0 ends the
#: request).
Preview = Callable[[Sequence[int]], int]


@dataclass(frozen=True)
class RoundRecord:
    """One round of one request, in tokens.

    Args:
        proposed: P, drafts that were verified.
        accepted: A, drafts that were accepted.
        licensed: L = A + 1, outputs the round allowed.
        committed: N, outputs that were published.
    """

    proposed: int
    accepted: int
    licensed: int
    committed: int


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
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else 0.0


@dataclass(eq=False)
class Request:
    """A submitted request: handle of the caller, record of the engine. Callers read it and change
    nothing.

    Args:
        id: number within its engine, in order of submission.
        prompt: prompt ids.
        params: sampling parameters.
        stops: ids at which it stops.
        budget: tokens it may publish: `max_new_tokens`, or less where the capacity ends first.
        preview: a frontend's own choice of N.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    stops: frozenset[int]
    budget: int
    preview: Preview | None = None
    token_ids: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DFlashGraphError | None = None

    # What the model holds of it.
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    #: F: positions the target has processed; during prefill, prompt tokens so far.
    frontier: int = 0
    #: Positions that are draft context; `frontier - context_frontier` committed columns are
    #: pending.
    context_frontier: int = 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_admitted(self) -> bool:
        return self.slot >= 0

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is processed and its anchor chosen."""
        return bool(self.token_ids) and not self.is_finished

    @property
    def anchor(self) -> int:
        """The last published token, chosen but not processed."""
        return self.token_ids[-1]

    @property
    def remaining(self) -> int:
        """Tokens left of its budget."""
        return self.budget - len(self.token_ids)

    @property
    def pending(self) -> int:
        """Committed columns whose features are not yet draft context."""
        return self.frontier - self.context_frontier
