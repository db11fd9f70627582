"""Intervals and tests: known values, symmetries, and what noise may not do."""

from __future__ import annotations

from random import Random

import pytest

from dflash_graph.profile.sampling_statistics import ratio_interval, sign_test, wilson


def test_wilson_of_known_shares() -> None:
    found = wilson(8, 10)  # 0.490, 0.943 in Wilson's own form
    assert (found.low, found.high) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )
    assert wilson(0, 10).low == 0.0 and wilson(0, 10).high == pytest.approx(0.2775, abs=1e-4)
    assert wilson(10, 10).high == 1.0
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


@pytest.mark.parametrize(("hits", "trials"), [(0, 3), (2, 7), (50, 100), (999, 1000)])
def test_wilson_is_symmetric_and_holds_the_share(hits: int, trials: int) -> None:
    found, other = wilson(hits, trials), wilson(trials - hits, trials)
    assert found.holds(hits / trials)
    assert found.low == pytest.approx(1 - other.high) and found.high == pytest.approx(1 - other.low)


def test_sign_test_of_known_counts() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(0, 5) == sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 9) == pytest.approx(2 * 11 / 1024)
    assert sign_test(5, 5) == 1.0
    assert sign_test(400, 600) < 1e-9


def test_ratio_interval_sees_a_shift_and_not_noise() -> None:
    numbers = Random(3)

    def times(center: float) -> list[float]:
        return [numbers.gauss(center, 1) for _ in range(30)]

    shifted = ratio_interval(times(100), times(105))
    assert shifted is not None and shifted.low > 1.03 and shifted.holds(1.05)
    same = ratio_interval(times(100), times(100))
    assert same is not None and same.holds(1.0) and same.high - same.low < 0.03


def test_one_measurement_has_no_interval() -> None:
    assert ratio_interval([1.0], [1.0, 2.0]) is None
    assert ratio_interval([1.0, 2.0], [1.0]) is None


def test_the_verdict_of_the_same_numbers_is_the_same() -> None:
    before, after = [1.0, 2.0, 4.0], [2.0, 3.0, 3.5]
    assert ratio_interval(before, after) == ratio_interval(before, after)
