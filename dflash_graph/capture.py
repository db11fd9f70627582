"""capture: launches of a segment become one CUDA Graph, and it is held to allocate nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dflash_graph.errors import PlanError


def capture(run: Callable[[], None], stream: torch.cuda.Stream, what: str) -> torch.cuda.CUDAGraph:
    """Capture what `run` launches.

    Args:
        run: launches only: everything it uses is compiled, loaded and allocated.
        stream: a side stream to capture on.
        what: for messages.

    Raises:
        PlanError: `run` allocated device memory, which no plan has.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            before = _allocations()
            run()
            made = _allocations() - before
        finally:
            graph.capture_end()
    if made:
        raise PlanError(
            f"{what}: expected a capture that allocates nothing, got {made} allocations"
        )
    return graph


def _allocations() -> int:
    """Blocks of device memory that torch has handed out so far."""
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
