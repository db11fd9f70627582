"""statistics: what rounds did, for one request and for an engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "error"]


class RoundRecord(NamedTuple):
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


@dataclass
class Statistics:
    """Counts over rounds, in tokens.

    Args:
        rounds: rounds.
        drafted: drafts that were verified.
        committed: tokens that rounds published.
        drafts: how often a round verified so many drafts and accepted so many of them.
        ended: finished requests by reason.
        prefix_tokens: prompt tokens that came from a stored prefix instead of prefill.
    """

    rounds: int = 0
    drafted: int = 0
    committed: int = 0
    drafts: dict[tuple[int, int], int] = field(default_factory=dict)
    ended: dict[FinishReason, int] = field(default_factory=dict)
    prefix_tokens: int = 0

    @classmethod
    def of(cls, records: Iterable[RoundRecord]) -> Statistics:
        """Counts of some rounds."""
        counts = cls()
        for record in records:
            counts.add(record)
        return counts

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(accepted * count for (_, accepted), count in self._drafts())

    @property
    def verified_by_position(self) -> list[int]:
        """How often draft 1, 2, ... was verified."""
        return self._by_position(0)

    @property
    def accepted_by_position(self) -> list[int]:
        """How often draft 1, 2, ... was accepted; its share of those that were verified is the
        survival of a position.
        """
        return self._by_position(1)

    def _by_position(self, which: int) -> list[int]:
        drafts = self._drafts()
        longest = max((verified for (verified, _), _ in drafts), default=0)
        return [
            sum(count for numbers, count in drafts if numbers[which] > position)
            for position in range(longest)
        ]

    def _drafts(self) -> Collection[tuple[tuple[int, int], int]]:
        """Of a copy, which is made at once: other threads may read while rounds are counted, and
        making the pairs of a list may let them in.
        """
        return self.drafts.copy().items()

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens over rounds; 0.0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0

    def add(self, record: RoundRecord) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += record.proposed
        self.committed += record.committed
        numbers = record.proposed, record.accepted
        self.drafts[numbers] = self.drafts.get(numbers, 0) + 1
