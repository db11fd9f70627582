"""Rounds timed node by node, for a profile: on the device as they are captured, else step by step.

Where rounds are captured, launches of the same kernel are replayed together in one graph, so that a
layer's weights do not wait in the cache for their own next turn; each launch gets its share. Other
rounds are stamped after every step: by the wall clock on the CPU, by events on a device.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch

from dflash_graph.bench.floor import read_ceiling
from dflash_graph.bench.rounds import fill_state, require_context, round_frame
from dflash_graph.bench.timing import captured, interleaved
from dflash_graph.executors import RoundExecutor
from dflash_graph.kernels import node_case
from dflash_graph.lowering.segment import Launch
from dflash_graph.profile.measured import ExecutorTimes
from dflash_graph.profile.parts import Ceiling
from dflash_graph.rounds import Rounds

_HOST_CEILING_BYTES: Final = 256 << 20

#: What torch says where an operation makes the host wait.
_SYNC_WARNING: Final = "called a synchronizing CUDA operation"

#: Rounds that are not counted: caches settle, and what is lazy happens.
_WARM_TURNS: Final = 2


def time_rounds(
    rounds: Rounds,
    *,
    batches: Sequence[int],
    context: int,
    turns: int = 30,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, ExecutorTimes]:
    """Time rounds of some exact batches over random state, by executor name.

    Args:
        rounds: compiled; their state is overwritten.
        batches: each B to time.
        context: tokens before the block.
        turns: rounds that are timed.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        OptionError: the context does not fit, or lies before the first block.
    """
    require_context(rounds, context)
    fill_state(rounds)
    found = {}
    for done, batch in enumerate(batches):
        if progress is not None:
            progress("time", done, len(batches))
        executor = rounds[batch]
        ran = executor.runs
        fields = round_frame(rounds, batch, context)
        executor.forward({name: fields[name] for name in fields if name in executor.inputs})
        executor.finish([rounds.columns] * batch)
        time_one = _replayed if executor.is_captured else _stamped
        found[f"round B={batch}"] = time_one(executor, turns)
        executor.runs = ran  # timing serves nobody
    if progress is not None:
        progress("time", len(batches), len(batches))
    return found


def measured_ceiling(kind: str, tflop_per_s: float | None = None) -> Ceiling:
    """What this device's memory gives to a kernel that only reads.

    Args:
        kind: `"cpu"` or `"cuda"`.
        tflop_per_s: a stated ceiling of arithmetic.
    """
    found = read_ceiling() if kind == "cuda" else _host_ceiling()
    return Ceiling(read_tb_per_s=found, tflop_per_s=tflop_per_s, source="measured")


def _host_ceiling(turns: int = 5) -> float:
    """TB/s of a sum over 256 MiB, median."""
    source = torch.ones(_HOST_CEILING_BYTES // 4)
    source.sum()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        source.sum()
        times.append(time.perf_counter() - start)
    return _HOST_CEILING_BYTES / statistics.median(times) / 1e12


class _Clock(Protocol):
    """Marks moments; the microseconds between two are known once `settle` was called."""

    def mark(self) -> Any: ...

    def between(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None: ...


class _HostClock:
    def mark(self) -> float:
        return time.perf_counter()

    def between(self, start: float, end: float) -> float:
        return 1e6 * (end - start)

    def settle(self) -> None:
        pass


class _DeviceClock:
    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return 1e3 * start.elapsed_time(end)

    def settle(self) -> None:
        torch.cuda.synchronize()


def _stamped(executor: RoundExecutor, turns: int) -> ExecutorTimes:
    """Every step of real rounds, one after another, with a mark after each."""
    clock: _Clock = _DeviceClock() if executor.arena.is_cuda else _HostClock()
    segments: list[list[float]] = [[] for _ in executor.segments]
    steps: dict[tuple[int, int], list[float]] = defaultdict(list)
    rounds = []
    for turn in range(-_WARM_TURNS, turns):
        marks = [_marked_segment(executor, index, clock) for index in range(len(segments))]
        clock.settle()
        if turn < 0:
            continue
        for index, (start, *stamps, end) in enumerate(marks):
            segments[index].append(clock.between(start, end))
            for at in range(len(stamps) - 1):
                steps[index, at].append(clock.between(stamps[at], stamps[at + 1]))
        rounds.append(clock.between(marks[0][0], marks[-1][-1]))
    return ExecutorTimes(
        tuple(rounds),
        tuple(map(tuple, segments)),
        {key: tuple(values) for key, values in steps.items()},
        _host_syncs(executor),
    )


def _marked_segment(executor: RoundExecutor, index: int, clock: _Clock) -> list[Any]:
    """Marks of one segment: its start, before its first step, after each step, its end."""
    marks = [clock.mark()]
    executor.frames[index].upload()
    marks.append(clock.mark())
    executor.segments[index].run(lambda step, values: marks.append(clock.mark()))
    if executor.compiled.graphs[index].by_role("output"):
        executor.outputs.download()
    marks.append(clock.mark())
    return marks


def _replayed(executor: RoundExecutor, turns: int) -> ExecutorTimes:
    """Captured segments as they run, and the launches of each kernel replayed alone."""
    parts = [partial(executor.run_queued, index) for index in range(len(executor.segments))]
    segments = interleaved(parts, turns)
    groups: dict[Any, list[tuple[tuple[int, int], Launch]]] = defaultdict(list)
    for index, segment in enumerate(executor.segments):
        schedule = segment.schedule
        for at, launch in enumerate(segment.launches):
            (node,) = launch.step.nodes
            case = node_case(schedule.graph, node, schedule.choices)
            groups[node.op, case].append(((index, at), launch))
    graphs = [
        captured(partial(_run_all, [launch for _, launch in group])) for group in groups.values()
    ]
    times = interleaved([graph.replay for graph in graphs], turns)
    return ExecutorTimes(
        tuple(sum(turn) for turn in zip(*segments, strict=True)),
        tuple(map(tuple, segments)),
        {
            key: tuple(value / len(group) for value in values)
            for group, values in zip(groups.values(), times, strict=True)
            for key, _ in group
        },
        _host_syncs(executor),
    )


def _run_all(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()


def _host_syncs(executor: RoundExecutor) -> tuple[int, ...]:
    """Host synchronizations that torch sees in one uncaptured run of each segment; none are looked
    for on the CPU.
    """
    if not executor.arena.is_cuda:
        return ()
    found = []
    mode = torch.cuda.get_sync_debug_mode()
    for segment in executor.segments:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                segment.run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        found.append(sum(_SYNC_WARNING in str(warning.message) for warning in caught))
    return tuple(found)
