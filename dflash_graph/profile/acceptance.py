"""acceptance: what an engine's counts say about drafts, and which K they speak for.

Survival of position i is the share of rounds that accepted draft i among those that verified it.
What another K would do is taken from these shares: that is exact for a K that only cuts a block
short, and an extrapolation where the draft's proposal depends on the block's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Final

from dflash_graph.errors import OptionError, ProfileError
from dflash_graph.options import MAX_DRAFT_TOKENS
from dflash_graph.profile.parts import AcceptanceCounts
from dflash_graph.profile.sampling_statistics import Interval, percentiles, wilson
from dflash_graph.statistics import RoundRecord, Statistics

#: A K is resolved where it is the best in this share of the draws.
RESOLVED: Final = 0.95

_DRAWS: Final = 2000
_RECORD: Final = frozenset(RoundRecord._fields)


@dataclass(frozen=True)
class Survival:
    """One position: how often its draft was verified and accepted, and the share with its Wilson
    interval.
    """

    position: int
    verified: int
    accepted: int
    share: float
    interval: Interval


@dataclass(frozen=True)
class CandidateK:
    """What one K would give: tokens a round and tokens a second, each with its interval.

    Args:
        best_share: share of the draws in which no other K is faster.
    """

    draft_tokens: int
    ms: float
    tokens_per_round: float
    tokens_interval: Interval
    tokens_per_second: float
    speed_interval: Interval
    best_share: float


@dataclass(frozen=True)
class BestK:
    """The K with the highest expected speed; `is_resolved` says whether the counts tell it apart
    from the others.
    """

    candidates: tuple[CandidateK, ...]
    draft_tokens: int
    is_resolved: bool


def counts_in(document: object) -> AcceptanceCounts:
    """Counts over every round record in a JSON document, such as `generate --json` prints.

    Raises:
        ProfileError: there is no record of a round in it, or one that no round makes.
    """
    counts = Statistics.of(_records(document))
    if not counts.rounds:
        raise ProfileError(
            "acceptance: expected records of rounds (proposed, accepted, licensed, committed), got "
            "none"
        )
    return counts_of(counts)


def counts_of(statistics: Statistics, ms_per_round: float | None = None) -> AcceptanceCounts:
    """An engine's counts as a part of a profile."""
    return AcceptanceCounts(
        rounds=statistics.rounds,
        drafted=statistics.drafted,
        committed=statistics.committed,
        verified_by_position=tuple(statistics.verified_by_position),
        accepted_by_position=tuple(statistics.accepted_by_position),
        ms_per_round=ms_per_round,
    )


def _records(document: object) -> Iterator[RoundRecord]:
    pending = [document]
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping):
            if found.keys() >= _RECORD:
                yield _record({name: found[name] for name in RoundRecord._fields})
                continue
            found = list(found.values())
        if isinstance(found, list):
            pending += reversed(found)


def _record(values: Mapping[str, object]) -> RoundRecord:
    """A record as a round makes it.

    Raises:
        ProfileError: no round does.
    """
    counts = [value for value in values.values() if type(value) is int]
    if len(counts) == len(values):
        record = RoundRecord(*counts)
        if (
            0 <= record.accepted <= record.proposed <= MAX_DRAFT_TOKENS
            and record.licensed == record.accepted + 1
            and 0 <= record.committed <= record.licensed
        ):
            return record
    raise ProfileError(
        f"acceptance: expected records of rounds with 0 <= accepted <= proposed <= "
        f"{MAX_DRAFT_TOKENS}, licensed = accepted + 1 and 0 <= committed <= licensed, got "
        f"{dict(values)}"
    )


def survival(counts: AcceptanceCounts) -> tuple[Survival, ...]:
    """Survival of each position that was verified.

    Raises:
        ProfileError: the counts cannot have come from rounds.
    """
    _check(counts)
    pairs = zip(counts.verified_by_position, counts.accepted_by_position, strict=True)
    return tuple(
        Survival(
            index + 1,
            verified,
            accepted,
            accepted / verified if verified else 0.0,
            wilson(accepted, verified),
        )
        for index, (verified, accepted) in enumerate(pairs)
    )


def histogram(counts: AcceptanceCounts) -> tuple[int, ...]:
    """Rounds that accepted exactly 0, 1, ... drafts; they sum to the rounds."""
    _check(counts)
    at_least = (counts.rounds, *counts.accepted_by_position, 0)
    return tuple(more - less for more, less in pairwise(at_least))


def tokens_per_round(counts: AcceptanceCounts) -> float:
    """Tokens that a round published; 0.0 before the first."""
    return counts.committed / counts.rounds if counts.rounds else 0.0


def expected_tokens(counts: AcceptanceCounts, draft_tokens: int) -> float:
    """Tokens that a round of K drafts is expected to publish.

    Raises:
        OptionError: K drafts were never verified.
        ProfileError: the counts cannot have come from rounds.
    """
    tokens = _tokens([found.share for found in survival(counts)])
    if draft_tokens >= len(tokens):
        raise OptionError(
            f"acceptance: expected counts of K = {draft_tokens} drafts, got {len(tokens) - 1} "
            "verified positions"
        )
    return tokens[draft_tokens]


def best_k(counts: AcceptanceCounts, costs: Mapping[int, float]) -> BestK:
    """The expected best K from measured costs and survival.

    Uncertainty is that of the counts: shares of survivors between neighbouring positions are drawn
    from their Beta posteriors (Jeffreys' prior), costs are taken as they are.

    Args:
        counts: of an engine.
        costs: K -> milliseconds of a round.

    Raises:
        OptionError: a cost is not positive, or there is none for a K that the counts reach.
        ProfileError: there is no round yet.
    """
    positions = survival(counts)
    if not counts.rounds:
        raise ProfileError("acceptance: expected counts of at least one round, got none")
    wrong = {k: ms for k, ms in costs.items() if not 0 <= k <= len(positions) or not ms > 0}
    if wrong or not costs:
        raise OptionError(
            f"costs: expected positive milliseconds for K in 0..{len(positions)} (positions that "
            f"were verified), got {wrong or 'none'}"
        )
    expected = _tokens([found.share for found in positions])
    hazards = _hazards(positions)
    random = Random(0)
    draws: dict[int, list[float]] = {k: [] for k in costs}
    wins = dict.fromkeys(costs, 0)
    for _ in range(_DRAWS):
        shares, alive = [], 1.0
        for died_or_not in hazards:
            alive *= random.betavariate(*died_or_not)
            shares.append(alive)
        tokens = _tokens(shares)
        for k in costs:
            draws[k].append(tokens[k])
        wins[max(costs, key=lambda k: tokens[k] / costs[k])] += 1
    candidates = []
    for k, ms in sorted(costs.items()):
        interval = percentiles(sorted(draws[k]))
        per_second = 1e3 / ms
        candidates.append(
            CandidateK(
                k,
                ms,
                expected[k],
                interval,
                expected[k] * per_second,
                Interval(interval.low * per_second, interval.high * per_second),
                wins[k] / _DRAWS,
            )
        )
    best = max(candidates, key=lambda candidate: candidate.tokens_per_second)
    return BestK(tuple(candidates), best.draft_tokens, best.best_share >= RESOLVED)


def _hazards(positions: tuple[Survival, ...]) -> list[tuple[float, float]]:
    """Beta parameters of the share that survives a position among those that reached it.

    How many of the rounds that verified a position had accepted the one before is not counted; it
    is taken as that share of them.
    """
    found, before = [], 1.0
    for position in positions:
        reached = max(before * position.verified, position.accepted)
        found.append((position.accepted + 0.5, reached - position.accepted + 0.5))
        before = position.share
    return found


def _tokens(shares: list[float]) -> list[float]:
    """Expected tokens of a round by K: the drafts that survive, and one of the target's own."""
    tokens = [1.0]
    for share in shares:
        tokens.append(tokens[-1] + share)
    return tokens


def _check(counts: AcceptanceCounts) -> None:
    verified, accepted = counts.verified_by_position, counts.accepted_by_position
    is_sound = (
        len(verified) == len(accepted)
        and all(0 <= a <= v <= counts.rounds for v, a in zip(verified, accepted, strict=True))
        and list(accepted) == sorted(accepted, reverse=True)
    )
    if not is_sound:
        raise ProfileError(
            f"acceptance: expected accepted <= verified <= {counts.rounds} rounds, falling by "
            f"position, got verified {list(verified)}, accepted {list(accepted)}"
        )
