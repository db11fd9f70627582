"""Device time of captured work: events, medians, variants in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

#: Replays of every variant that are not counted: clocks and caches settle.
_WARM_TURNS = 2


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one call of `body`, after one call that compiles what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def interleaved(bodies: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Microseconds of `turns` calls of each body; they take turns, and the device is never idle in
    between.
    """
    times: list[list[float]] = [[] for _ in bodies]
    for turn in range(-_WARM_TURNS, turns):
        marks = []
        for body in bodies:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            body()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        if turn >= 0:
            for kept, (start, end) in zip(times, marks, strict=True):
                kept.append(1e3 * start.elapsed_time(end))
    return times


def medians(bodies: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Median microseconds of each body, see `interleaved`."""
    return [statistics.median(kept) for kept in interleaved(bodies, turns)]
