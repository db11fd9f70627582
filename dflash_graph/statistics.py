"""statistics: what rounds did, for one request and for an engine."""

from __future__ import annotations

from collections.abc import Iterable
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
        verified_by_position: how often draft 1, 2, ... was verified.
        accepted_by_position: how often draft 1, 2, ... was accepted; the share of the two is the
            survival of a position.
        ended: finished requests by reason.
        prefix_tokens: prompt tokens that came from a stored prefix instead of prefill.
    """

    rounds: int = 0
    drafted: int = 0
    committed: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
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
        return sum(self.accepted_by_position)

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens over rounds; 0.0 before the first round."""
        return self.committed / self.rounds if self.rounds else 0.0

    def add(self, record: RoundRecord) -> None:
        """Count one round."""
        self.rounds += 1
        self.drafted += record.proposed
        self.committed += record.committed
        longer = record.proposed - len(self.verified_by_position)
        self.verified_by_position += [0] * longer
        self.accepted_by_position += [0] * longer
        for position in range(record.proposed):
            self.verified_by_position[position] += 1
        for position in range(record.accepted):
            self.accepted_by_position[position] += 1
