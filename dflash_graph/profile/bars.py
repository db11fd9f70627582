"""bars: the acceptance of drafts as pictures: how many were accepted, and which survived."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_graph.profile.acceptance import histogram, survival
from dflash_graph.profile.marks import Line, Mark, Tick, count_text, nice_steps
from dflash_graph.profile.parts import AcceptanceCounts


@dataclass(frozen=True)
class Bars:
    """Upright bars with labels below and, where there is one, an interval of each."""

    marks: tuple[Mark, ...]
    intervals: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def length_bars(counts: AcceptanceCounts) -> Bars:
    """How many rounds accepted exactly so many drafts."""
    rows = histogram(counts)
    highest = max(*rows, 1)
    marks, x_ticks = [], []
    for length, count in enumerate(rows):
        share = count / counts.rounds if counts.rounds else 0.0
        title = f"{count_text(length, 'draft')} accepted: {count_text(count, 'round')}, {share:.1%}"
        marks.append(_upright(length, len(rows), count / highest, "c0", title))
        x_ticks.append(Tick(100 * (length + 0.5) / len(rows), str(length)))
    y_ticks = tuple(
        Tick(100 - 100 * at / highest, f"{at:.0f}") for at in nice_steps(highest) if at % 1 == 0
    )
    return Bars(tuple(marks), (), tuple(x_ticks), y_ticks)


def survival_bars(counts: AcceptanceCounts) -> Bars:
    """The share of verified drafts that was accepted, position by position, with its interval."""
    positions = survival(counts)
    marks, intervals, x_ticks = [], [], []
    for index, found in enumerate(positions):
        low, high = found.interval.low, found.interval.high
        title = (
            f"position {found.position}: {found.accepted} of {found.verified} accepted, "
            f"{found.share:.1%} (95 %: {low:.1%} to {high:.1%})"
        )
        marks.append(_upright(index, len(positions), found.share, "c2", title))
        x = 100 * (index + 0.5) / len(positions)
        intervals.append(Line(x, 100 - 100 * high, x, 100 - 100 * low, "interval"))
        x_ticks.append(Tick(x, str(found.position)))
    y_ticks = tuple(Tick(100 - at, f"{at} %") for at in (0, 25, 50, 75, 100))
    return Bars(tuple(marks), tuple(intervals), tuple(x_ticks), y_ticks)


def _upright(index: int, count: int, share: float, style: str, title: str) -> Mark:
    slot = 100 / count
    return Mark(slot * (index + 0.15), 100 - 100 * share, slot * 0.7, 100 * share, style, title)
