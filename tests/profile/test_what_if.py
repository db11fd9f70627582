"""What-ifs are what a plan of the same numbers says, and what fits is the largest that does."""

from __future__ import annotations

import pytest

from dflash_graph import report
from dflash_graph.cli.selection import Dtype, select_pair
from dflash_graph.errors import OptionError
from dflash_graph.profile.build import declared_profile
from dflash_graph.profile.document import Ceiling
from dflash_graph.profile.what_if import Footprint, scenarios_of
from dflash_graph.state import Capacities

CEILING = Ceiling(read_tb_per_s=4.6)
PAIR = select_pair("demo-dflash2", None, None, None, Dtype.bfloat16)[0]


@pytest.fixture(scope="module")
def footprint() -> Footprint:
    return Footprint(PAIR, "eager", draft_tokens=5, max_batch=3, prefill_chunk=128)


def planned(batch: int, context: int) -> report.MemoryReport:
    return report.plan_memory(
        PAIR,
        "eager",
        draft_tokens=5,
        max_batch=batch,
        prefill_chunk=128,
        capacities=Capacities(batch, context),
    )


@pytest.mark.parametrize("context", [1, 64, 65, 5000])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_memory_is_what_a_plan_says(footprint: Footprint, batch: int, context: int) -> None:
    found, expected = footprint.memory(batch, context), planned(batch, context)
    assert report.memory_dict(found) == report.memory_dict(expected)


def test_scenarios(footprint: Footprint) -> None:
    found = scenarios_of([footprint], [1, 3], [256, 1024], 100, CEILING)
    assert [(one.max_batch, one.max_context) for one in found] == [
        (1, 256),
        (1, 1024),
        (3, 256),
        (3, 1024),
    ]
    profile = declared_profile(
        PAIR,
        "eager",
        name="demo",
        draft_tokens=5,
        max_batch=3,
        max_context=1024,
        prefill_chunk=128,
        context=100,
    )
    assert found[-1].round_floor_us == pytest.approx(profile.executor("round B=3").floor_us)
    assert found[-1].total == planned(3, 1024).total_bytes
    with pytest.raises(OptionError, match="at most 250 tokens"):
        scenarios_of([footprint], [1], [256, 1024], 251, CEILING)


@pytest.mark.parametrize("context", [64, 1000, 4096])
def test_the_largest_context_fits_and_the_next_page_does_not(
    footprint: Footprint, context: int
) -> None:
    size = planned(2, context).total_bytes
    found = footprint.largest_context(2, size, 1 << 20)
    assert found is not None and found >= context
    assert planned(2, found).total_bytes <= size < planned(2, found + 1).total_bytes
    assert footprint.largest_context(2, size - 1, 1 << 20) != found


def test_the_largest_batch(footprint: Footprint) -> None:
    size = planned(2, 1000).total_bytes
    assert footprint.largest_batch(1000, size) == 2
    assert footprint.largest_batch(1000, size - 1) == 1
    assert footprint.largest_batch(1000, 1 << 40) == 3
    assert footprint.largest_batch(1000, 1000) is None
    assert footprint.largest_context(1, 1000, 1 << 20) is None
    assert footprint.largest_context(1, 1 << 50, 3000) == 3000
    fits = footprint.fits(size, [1, 2], [1000], 1 << 14)
    assert fits.by_context == {1000: 2} and fits.by_batch[2] is not None
    assert (fits.by_batch[1] or 0) > fits.by_batch[2]


def test_a_batch_outside_is_refused(footprint: Footprint) -> None:
    with pytest.raises(OptionError, match=r"expected 1\.\.3, got 4"):
        footprint.memory(4, 100)
