"""measured: what a timing of one executor hands to the profile, whoever timed it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ExecutorTimes:
    """Repeated times of one executor, microseconds.

    Args:
        rounds: all segments one after another.
        segments: of each segment, in running order.
        steps: (segment, index of a step in it) -> times of that step.
        host_syncs: host synchronizations in one run of each segment; empty where nobody looked.
    """

    rounds: tuple[float, ...]
    segments: tuple[tuple[float, ...], ...]
    steps: Mapping[tuple[int, int], tuple[float, ...]]
    host_syncs: tuple[int, ...] = ()
