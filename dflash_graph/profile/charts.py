"""charts: the pictures of one executor: its round in time, its nodes under the roof, its arena."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple

from dflash_graph.profile.marks import Dot, Line, Mark, Tick, count_text, nice_steps
from dflash_graph.profile.parts import (
    BufferProfile,
    Ceiling,
    ExecutorProfile,
    NodeProfile,
    PlanProfile,
    Samples,
)
from dflash_graph.profile.quantities import rate_text, time_text
from dflash_graph.profile.regions import node_us, top_region
from dflash_graph.report import size_text


@dataclass(frozen=True)
class Lane:
    """A row of the timeline."""

    name: str
    total: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Timeline:
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class Roofline:
    """Nodes by arithmetic intensity and rate, both axes logarithmic; `left_out` nodes do no
    arithmetic.
    """

    dots: tuple[Dot, ...]
    ceilings: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left_out: int


@dataclass(frozen=True)
class Workspace:
    """Buffers of an arena: steps from left to right, addresses upwards."""

    marks: tuple[Mark, ...]
    regions: tuple[Mark, ...]
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def timeline(executor: ExecutorProfile, styles: Mapping[str, str]) -> Timeline:
    """The round as it was measured, its nodes by region, and their floors, on one axis."""
    nodes = tuple(executor.nodes())
    whole = executor.measured.median if executor.measured else None
    rows: list[tuple[str, float, list[_Part]]] = []
    segments = _measured_parts(executor)
    if segments:
        total = sum(part.us for part in segments)
        rows.append(("round, measured", total if whole is None else whole, segments))
    timed = sum(node.time_us is not None for node in nodes)
    if timed:
        spent = sum(map(node_us, nodes))
        name = "nodes, measured one by one"
        if timed < len(nodes):
            name += f" ({len(nodes) - timed} of {len(nodes)} not timed: floor)"
        rows.append((name, spent, [*_by_region(nodes, styles), *_rest(whole, spent)]))
    rows.append(("floor", executor.floor_us, list(_by_region(nodes, styles, floors=True))))
    axis = _Axis.of(max(sum(part.us for part in parts) for _, _, parts in rows))
    lanes = (Lane(name, time_text(us), tuple(axis.row(parts))) for name, us, parts in rows)
    return Timeline(tuple(lanes), axis.ticks)


class _Part(NamedTuple):
    """A stretch of time."""

    us: float
    style: str
    title: str


def _measured_parts(executor: ExecutorProfile) -> list[_Part]:
    """The segments that were measured and what is left of the round; the round where none was."""
    parts = [
        _Part(found.measured.median, "whole", f"{found.name}: {spread_text(found.measured)}")
        for found in executor.segments
        if found.measured is not None
    ]
    if executor.measured is None:
        return parts
    if not parts:
        return [_Part(executor.measured.median, "whole", spread_text(executor.measured))]
    return [*parts, *_rest(executor.measured.median, sum(part.us for part in parts))]


def _rest(whole: float | None, spent: float) -> Iterator[_Part]:
    """What is left of a round that was measured."""
    if whole is not None and whole > spent:
        yield _Part(whole - spent, "rest", f"unattributed: {time_text(whole - spent)}")


def spread_text(samples: Samples) -> str:
    """Median and half the distance between the quartiles."""
    return f"{time_text(samples.median)} ± {time_text(samples.spread)}"


def _by_region(
    nodes: Sequence[NodeProfile], styles: Mapping[str, str], *, floors: bool = False
) -> Iterator[_Part]:
    """Runs of nodes of one region, down to layers."""
    for region, run in groupby(nodes, key=lambda node: top_region(node.region, 2)):
        members = tuple(run)
        floor = sum(node.floor_us for node in members)
        took = floor if floors else sum(map(node_us, members))
        title = f"{region}: {time_text(took)}, {count_text(len(members), 'node')}"
        style = styles[top_region(region)]
        if not floors:
            title += f", floor {time_text(floor)}"
            if all(node.time_us is None for node in members):
                style += " estimated"
        yield _Part(took, style, title)


@dataclass(frozen=True)
class _Axis:
    """A linear axis from 0."""

    end: float
    ticks: tuple[Tick, ...]

    @classmethod
    def of(cls, end: float) -> _Axis:
        end = end if end > 0 else 1.0
        ticks = tuple(Tick(100 * at / end, time_text(at)) for at in nice_steps(end))
        return cls(end, ticks)

    def row(self, parts: Iterable[_Part]) -> Iterator[Mark]:
        """Marks end to end."""
        start = 0.0
        for part in parts:
            x, width = 100 * start / self.end, 100 * part.us / self.end
            yield Mark(x, 0, width, 100, part.style, part.title)
            start += part.us


@dataclass(frozen=True)
class _Alike:
    """Nodes of one top region that do the same work. Rates in operations a second."""

    region: str
    nodes: tuple[NodeProfile, ...]

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        first = self.nodes[0]
        return first.flops / (first.read_bytes + first.write_bytes)

    @property
    def us(self) -> float:
        """What all of them take."""
        return sum(map(node_us, self.nodes))

    @property
    def rate(self) -> float:
        return self.nodes[0].flops / median(map(node_us, self.nodes)) * 1e6

    @property
    def timed(self) -> bool:
        return any(node.time_us is not None for node in self.nodes)

    def dot(self, x: float, y: float, style: str, share: float) -> Dot:
        what = "achieved" if self.timed else "by the floor, not measured"
        title = (
            f"{self.nodes[0].op} in {self.region}, {count_text(len(self.nodes), 'node')}: "
            f"{self.intensity:.3g} flop/byte, {rate_text(self.rate)} ({what}), "
            f"{time_text(self.us)} together, {share:.1%} of what is drawn here"
        )
        style += "" if self.timed else " estimated"
        return Dot(x, y, 3 + 9 * math.sqrt(share), style, title)


def roofline(
    executor: ExecutorProfile, ceiling: Ceiling, styles: Mapping[str, str]
) -> Roofline | None:
    """Nodes under the roof of memory and arithmetic; None where no node does arithmetic.

    Nodes that do the same work in the same top region are one dot, at the median of their times.
    """
    drawn: dict[tuple[str, str, int, int, int], list[NodeProfile]] = defaultdict(list)
    nodes = tuple(executor.nodes())
    for node in nodes:
        if node.flops > 0 and node.read_bytes + node.write_bytes > 0 and node_us(node) > 0:
            work = (node.op, node.read_bytes, node.write_bytes, node.flops)
            drawn[top_region(node.region), *work].append(node)
    if not drawn:
        return None
    groups = [_Alike(key[0], tuple(members)) for key, members in drawn.items()]
    memory = ceiling.read_tb_per_s * 1e12
    compute = None if ceiling.tflop_per_s is None else ceiling.tflop_per_s * 1e12
    ridge = [] if compute is None else [compute / memory]
    x = _LogAxis.around([group.intensity for group in groups] + ridge)
    ends = [memory * x.first, compute or memory * x.last]
    y = _LogAxis.around([group.rate for group in groups] + ends)
    total = sum(group.us for group in groups)
    dots = [
        group.dot(
            x.at(group.intensity), 100 - y.at(group.rate), styles[group.region], group.us / total
        )
        for group in sorted(groups, key=lambda group: -group.us)
    ]
    turn = min(ridge[0] if ridge else x.last, y.last / memory)
    roof = [Line(0, 100 - y.at(memory * x.first), x.at(turn), 100 - y.at(memory * turn), "roof")]
    if compute is not None:
        roof.append(Line(x.at(turn), 100 - y.at(compute), 100, 100 - y.at(compute), "roof"))
    return Roofline(
        tuple(dots),
        tuple(roof),
        tuple(Tick(x.at(value), f"{value:g}") for value in x.decades(8)),
        tuple(Tick(100 - y.at(value), rate_text(value)) for value in y.decades(7)),
        len(nodes) - sum(len(group.nodes) for group in groups),
    )


@dataclass(frozen=True)
class _LogAxis:
    """A logarithmic axis between two powers of ten."""

    low: int
    high: int

    @classmethod
    def around(cls, values: Sequence[float]) -> _LogAxis:
        """At least two decades that hold some positive numbers."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return cls(low, max(high, low + 2))

    @property
    def first(self) -> float:
        return 10.0**self.low

    @property
    def last(self) -> float:
        return 10.0**self.high

    def at(self, value: float) -> float:
        """Percent of the axis."""
        return 100 * (math.log10(value) - self.low) / (self.high - self.low)

    def decades(self, most: int) -> Iterator[float]:
        """Powers of ten, at most about so many."""
        step = max(1, math.ceil((self.high - self.low) / most))
        return (10.0**power for power in range(self.low, self.high + 1, step))


def workspace(executor: ExecutorProfile, styles: Mapping[str, str]) -> Workspace | None:
    """The arena's buffers by address and life; None where the plan has none."""
    plan = executor.plan
    if not plan.buffers or not plan.arena_bytes:
        return None
    steps = max(len(plan.steps), max(buffer.last for buffer in plan.buffers) + 1)
    regions: dict[int, str] = {}
    for node in executor.nodes():
        regions.setdefault(node.step, top_region(node.region))
    marks = []
    for buffer in plan.buffers:
        style = styles[regions[buffer.first]] if buffer.first in regions else "whole"
        kept = any(buffer.first < start <= buffer.last for start in plan.boundaries[1:])
        marks.append(
            Mark(
                100 * buffer.first / steps,
                100 - 100 * (buffer.offset + buffer.nbytes) / plan.arena_bytes,
                100 * (buffer.last + 1 - buffer.first) / steps,
                100 * buffer.nbytes / plan.arena_bytes,
                style + (" kept" if kept else ""),
                _buffer_title(plan, buffer) + (", kept for a later segment" if kept else ""),
            )
        )
    bound = 100 - 100 * plan.lower_bound_bytes / plan.arena_bytes
    starts = [100 * start / steps for start in plan.boundaries[1:]]
    return Workspace(
        tuple(marks),
        tuple(_region_band(regions, steps, styles)),
        (Line(0, bound, 100, bound, "bound"), *(Line(x, 0, x, 100, "boundary") for x in starts)),
        tuple(Tick(100 * at / steps, f"{at:.0f}") for at in nice_steps(steps) if at % 1 == 0),
        tuple(
            Tick(100 - 100 * at / plan.arena_bytes, size_text(round(at)))
            for at in _byte_steps(plan.arena_bytes)
        ),
    )


def _buffer_title(plan: PlanProfile, buffer: BufferProfile) -> str:
    first, last = (
        plan.steps[step] if step < len(plan.steps) else str(step)
        for step in (buffer.first, buffer.last)
    )
    return (
        f"{' -> '.join(buffer.values) or buffer.name}: {size_text(buffer.nbytes)} at offset "
        f"{buffer.offset}, steps {buffer.first} to {buffer.last} ({first} to {last})"
    )


def _region_band(
    regions: Mapping[int, str], steps: int, styles: Mapping[str, str]
) -> Iterator[Mark]:
    """Which region runs at each step."""
    for top, run in groupby(sorted(regions.items()), key=lambda item: item[1]):
        numbers = [step for step, _ in run]
        width = numbers[-1] + 1 - numbers[0]
        title = f"{top}: steps {numbers[0]} to {numbers[-1]}"
        yield Mark(100 * numbers[0] / steps, 0, 100 * width / steps, 100, styles[top], title)


def _byte_steps(end: int) -> list[float]:
    """Round numbers of bytes in powers of 1024."""
    unit = 1024.0 ** math.floor(math.log(max(end, 1), 1024))
    return [at * unit for at in nice_steps(end / unit)]
