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
    """Microseconds of `turns` calls of each body; they take turns, and all are queued before the
    first is timed to its end: the device is never idle in between, and waits for no launch.
    """
    marks = []
    for _ in range(_WARM_TURNS + turns):
        for body in bodies:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            body()
            end.record()
            marks.append((start, end))
    torch.cuda.synchronize()
    times = [1e3 * start.elapsed_time(end) for start, end in marks]
    return [times[len(bodies) * _WARM_TURNS + index :: len(bodies)] for index in range(len(bodies))]


def medians(bodies: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Median microseconds of each body, see `interleaved`."""
    return [statistics.median(kept) for kept in interleaved(bodies, turns)]
