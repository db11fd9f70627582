"""trace: a profile as Chrome trace events, for Perfetto and chrome://tracing.

An executor is a process. Its rounds are drawn from what the document holds, not from a run: nodes
stand end to end in running order, each as long as it was measured or, where nobody did, as its
floor. Times are microseconds, as the format wants them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import ExecutorProfile, NodeProfile, PlanProfile, SegmentProfile
from dflash_graph.profile.regions import node_us, parts

Event = dict[str, Any]

#: Threads of an executor's process, from top to bottom.
_THREADS: Final = ("segments", "nodes by region", "floors by region")
_SEGMENTS, _NODES, _FLOORS = range(1, 4)

_STARTUP_PROCESS: Final = 1


def trace_events(profile: Profile) -> dict[str, Any]:
    """The profile as one JSON-ready trace: the start-up, then each executor with its segments, its
    nodes nested by region, their floors, and the live bytes of its arena.

    Args:
        profile: the document.

    Returns:
        The object format of Chrome traces, complete events sorted within each thread.
    """
    events = [*_startup(profile)]
    for number, executor in enumerate(profile.executors):
        events += _executor(executor, _STARTUP_PROCESS + 1 + number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "name": profile.identity.name,
            "device": profile.identity.device.name,
            "created": profile.identity.created,
            "choices": profile.identity.choices,
            "layout": "nodes end to end in running order, as long as measured, else as their floor",
        },
    }


def _startup(profile: Profile) -> Iterator[Event]:
    if not profile.startup:
        return
    yield _metadata("process_name", _STARTUP_PROCESS, {"name": "start-up"})
    yield _metadata("process_sort_index", _STARTUP_PROCESS, {"sort_index": _STARTUP_PROCESS})
    start = 0.0
    for stage in profile.startup:
        duration = stage.seconds * 1e6
        yield _slice(stage.name, "startup", _STARTUP_PROCESS, 1, start, duration, {})
        start += duration


def _executor(executor: ExecutorProfile, process: int) -> Iterator[Event]:
    yield _metadata("process_name", process, {"name": executor.name})
    yield _metadata("process_sort_index", process, {"sort_index": process})
    for number, name in enumerate(_THREADS, start=1):
        yield _metadata("thread_name", process, {"name": name}, number)
    starts = _segment_starts(executor)
    for segment, (start, end) in zip(executor.segments, pairwise(starts), strict=True):
        yield _slice(
            segment.name,
            "segment",
            process,
            _SEGMENTS,
            start,
            end - start if segment.measured is None else segment.measured.median,
            {
                "graph_hash": segment.graph_hash,
                "nodes": len(segment.nodes),
                "measured_us": None if segment.measured is None else segment.measured.median,
                "spread_us": None if segment.measured is None else segment.measured.spread,
                "host_syncs": segment.host_syncs,
            },
        )
    for thread, floors in ((_NODES, False), (_FLOORS, True)):
        for segment, start in zip(executor.segments, starts, strict=False):
            yield from _nested(segment, process, thread, start, floors)
    yield from _arena(executor, process, starts)


def _segment_starts(executor: ExecutorProfile) -> list[float]:
    """Where each segment begins, and where the last one ends."""
    starts = [0.0]
    for segment in executor.segments:
        nodes = sum(map(node_us, segment.nodes))
        whole = 0.0 if segment.measured is None else segment.measured.median
        starts.append(starts[-1] + max(nodes, whole))
    return starts


def _nested(
    segment: SegmentProfile, process: int, thread: int, start: float, floors: bool
) -> Iterator[Event]:
    """A slice a node inside a slice for each part of its region's path."""
    now = start
    open_regions: list[tuple[str, Event]] = []

    def close(count: int) -> None:
        while len(open_regions) > count:
            _, event = open_regions.pop()
            event["dur"] = now - event["ts"]

    for node in segment.nodes:
        path = parts(node.region)
        shared = 0
        for part, (name, _) in zip(path, open_regions, strict=False):
            if part != name:
                break
            shared += 1
        close(shared)
        for depth in range(shared, len(path)):
            region = {"region": "/".join(path[: depth + 1])}
            event = _slice(path[depth], "region", process, thread, now, 0.0, region)
            open_regions.append((path[depth], event))
            yield event
        duration = node.floor_us if floors else node_us(node)
        name = node.name.rpartition("/")[2]
        yield _slice(name, node.op, process, thread, now, duration, _facts(node))
        now += duration
    close(0)


def _facts(node: NodeProfile) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "node": node.name,
        "op": node.op,
        "region": node.region,
        "implementation": node.implementation,
        "source": node.source,
        "bound": node.bound,
        "read_bytes": node.read_bytes,
        "write_bytes": node.write_bytes,
        "flops": node.flops,
        "floor_us": node.floor_us,
        "measured_us": node.time_us,
    }
    if node.measured is not None:
        facts["spread_us"] = node.measured.spread
    if node.config is not None:
        facts["config"] = f"{node.config.template} {node.config.text}"
    if node.resources:
        facts["resources"] = [kernel.model_dump() for kernel in node.resources]
    if node.inputs:
        facts["inputs"] = list(node.inputs)
    if node.weights:
        facts["weights"] = list(node.weights)
    return facts


def _arena(executor: ExecutorProfile, process: int, starts: Sequence[float]) -> Iterator[Event]:
    """A counter of the arena's live bytes at the beginning of each step, and zero at the end."""
    when: dict[int, float] = {}
    for segment, start in zip(executor.segments, starts, strict=False):
        now = start
        for node in segment.nodes:
            when.setdefault(node.step, now)
            now += node_us(node)
    live = live_bytes(executor.plan)
    for step in sorted(when):
        if step < len(live):
            yield _counter(process, when[step], live[step])
    if when:
        yield _counter(process, starts[-1], 0)


def live_bytes(plan: PlanProfile) -> list[int]:
    """Bytes of the buffers that are live at each step."""
    changes = [0] * (len(plan.steps) + 1)
    for buffer in plan.buffers:
        changes[buffer.first] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    live, total = [], 0
    for change in changes[:-1]:
        total += change
        live.append(total)
    return live


def _slice(
    name: str,
    category: str,
    process: int,
    thread: int,
    start: float,
    duration: float,
    facts: dict[str, Any],
) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": facts,
    }


def _counter(process: int, when: float, nbytes: int) -> Event:
    return {
        "name": "arena, live bytes",
        "ph": "C",
        "pid": process,
        "ts": when,
        "args": {"bytes": nbytes},
    }


def _metadata(name: str, process: int, facts: dict[str, Any], thread: int | None = None) -> Event:
    where = {} if thread is None else {"tid": thread}
    return {"name": name, "ph": "M", "pid": process, **where, "args": facts}
