"""Acceptance: counts, histogram, survival, and the K they speak for."""

from __future__ import annotations

from random import Random

import pytest

from dflash_graph.errors import OptionError, ProfileError
from dflash_graph.profile.acceptance import (
    best_k,
    counts_in,
    counts_of,
    expected_tokens,
    histogram,
    survival,
    tokens_per_round,
)
from dflash_graph.profile.parts import AcceptanceCounts
from dflash_graph.statistics import RoundRecord, Statistics


def counted(records: list[RoundRecord]) -> AcceptanceCounts:
    return counts_of(Statistics.of(records))


def drawn(share: float, rounds: int, proposed: int, seed: int = 1) -> list[RoundRecord]:
    """Rounds whose drafts survive one by one with a probability."""
    numbers = Random(seed)
    records = []
    for _ in range(rounds):
        accepted = 0
        while accepted < proposed and numbers.random() < share:
            accepted += 1
        records.append(RoundRecord(proposed, accepted, accepted + 1, accepted + 1))
    return records


def test_histogram_counts_each_round_once() -> None:
    records = [
        RoundRecord(3, 0, 1, 1),
        RoundRecord(3, 2, 3, 3),
        RoundRecord(3, 2, 3, 3),
        RoundRecord(3, 3, 4, 2),  # the host kept two of four
        RoundRecord(1, 1, 2, 2),  # the budget's last round verified one
        RoundRecord(0, 0, 1, 1),
    ]
    counts = counted(records)
    assert histogram(counts) == (2, 1, 2, 1)
    assert tokens_per_round(counts) == pytest.approx(12 / 6)
    shares = [(one.verified, one.accepted) for one in survival(counts)]
    assert shares == [(5, 4), (4, 3), (4, 1)]
    assert survival(counts)[0].interval.holds(4 / 5)


def test_no_rounds() -> None:
    counts = counted([])
    assert (histogram(counts), survival(counts), tokens_per_round(counts)) == ((0,), (), 0.0)
    with pytest.raises(ProfileError, match="at least one round"):
        best_k(counts, {0: 1.0})


def test_expected_tokens_of_every_k() -> None:
    records = drawn(0.7, 4000, 7)
    found = best_k(counted(records), {k: 1.0 for k in range(8)})
    for candidate in found.candidates:
        k = candidate.draft_tokens
        cut = sum(min(record.accepted, k) + 1 for record in records) / len(records)
        assert candidate.tokens_per_round == pytest.approx(cut)
        assert candidate.tokens_interval.holds(candidate.tokens_per_round)
        exact = sum(0.7**position for position in range(k + 1))
        assert candidate.tokens_interval.holds(exact)
    assert found.draft_tokens == 7


def test_cost_decides() -> None:
    counts = counted(drawn(0.5, 3000, 7))
    cheap = best_k(counts, {3: 1.0, 7: 1.0})
    assert cheap.draft_tokens == 7 and cheap.is_resolved
    dear = best_k(counts, {3: 1.0, 7: 1.5})
    assert dear.draft_tokens == 3 and dear.is_resolved
    speed = {one.draft_tokens: one.tokens_per_second for one in dear.candidates}
    assert speed[3] == pytest.approx(1e3 * dear.candidates[0].tokens_per_round)


def test_few_rounds_do_not_resolve() -> None:
    """K = 3 and K = 7 that cost what they give; twenty rounds cannot tell them apart."""
    tokens = {k: (1 - 0.7 ** (k + 1)) / 0.3 for k in (3, 7)}
    found = best_k(counted(drawn(0.7, 20, 7)), tokens)
    assert not found.is_resolved
    shares = [one.best_share for one in found.candidates]
    assert sum(shares) == pytest.approx(1) and max(shares) < 0.95


def test_more_rounds_make_intervals_narrower() -> None:
    def width(rounds: int) -> float:
        (found,) = best_k(counted(drawn(0.6, rounds, 7)), {7: 1.0}).candidates
        return found.tokens_interval.high - found.tokens_interval.low

    assert width(6400) < width(400) / 3 < width(25)


@pytest.mark.parametrize("costs", [{}, {8: 1.0}, {-1: 1.0}, {3: 0.0}, {3: float("nan")}])
def test_costs_that_mean_nothing(costs: dict[int, float]) -> None:
    with pytest.raises(OptionError, match=r"K in 0\.\.7"):
        best_k(counted(drawn(0.5, 20, 7)), costs)


def test_tokens_that_a_chain_is_expected_to_publish() -> None:
    records = [RoundRecord(3, 0, 1, 1), RoundRecord(3, 1, 2, 2), RoundRecord(3, 3, 4, 4)]
    counts = counted([*records, RoundRecord(1, 1, 2, 2)])
    # Of 4, 3 and 3 rounds that verified a draft, 3, 1 and 1 accepted it.
    expected = [1, 1 + 3 / 4, 1 + 3 / 4 + 1 / 3, 1 + 3 / 4 + 2 / 3]
    assert [expected_tokens(counts, k) for k in range(4)] == pytest.approx(expected)
    with pytest.raises(OptionError, match="K = 4 drafts, got 3 verified positions"):
        expected_tokens(counts, 4)


def test_counts_that_no_rounds_made() -> None:
    sound = counted(drawn(0.5, 20, 3))
    for change in (
        {"accepted_by_position": (21, 1, 0)},
        {"accepted_by_position": (5, 6, 0)},
        {"accepted_by_position": (5,)},
    ):
        with pytest.raises(ProfileError, match="expected accepted"):
            histogram(sound.model_copy(update=change))


def test_records_in_any_document() -> None:
    record = {"proposed": 2, "accepted": 1, "licensed": 2, "committed": 2}
    document = {"prompts": [{"rounds": [record, record]}, {"rounds": []}], "total": {"rounds": 2}}
    assert counts_in(document) == counted([RoundRecord(2, 1, 2, 2)] * 2)
    for empty in ({}, [], None, 3, {"rounds": [{"proposed": 1}]}, [{**record, "accepted": "1"}]):
        with pytest.raises(ProfileError, match="records of rounds"):
            counts_in(empty)


@pytest.mark.parametrize(
    "change",
    [
        {"proposed": 10**9},
        {"proposed": 16},
        {"proposed": 0},
        {"accepted": -1, "licensed": 0, "committed": 0},
        {"licensed": 3},
        {"committed": 3},
        {"committed": -1},
        {"committed": True},
        {"proposed": 2.0},
    ],
    ids=str,
)
def test_records_that_no_round_makes(change: dict[str, object]) -> None:
    record = {"proposed": 2, "accepted": 1, "licensed": 2, "committed": 2}
    wrong = record | change
    with pytest.raises(ProfileError, match="accepted <= proposed <= 15") as raised:
        counts_in({"rounds": [record, wrong]})
    assert str(raised.value).endswith(f"got {wrong}")


def test_records_lie_at_any_depth() -> None:
    document: object = {"proposed": 15, "accepted": 15, "licensed": 16, "committed": 0}
    for _ in range(5000):
        document = [document]
    assert counts_in(document) == counted([RoundRecord(15, 15, 16, 0)])
