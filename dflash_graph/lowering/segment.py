"""A bound segment: steps with their tensors resolved, ready to run again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor

from dflash_graph.errors import OptionError
from dflash_graph.graph import Node
from dflash_graph.passes.schedule import Schedule, Step

#: Called after a step with the step and what it stored, by value name.
Probe = Callable[[Step, Mapping[str, Tensor]], None]

#: Set to 1, launches on a CUDA device stand in NVTX ranges by region. A CUDA Graph records kernels
#: and no ranges, so they show where segments run uncaptured: `EngineOptions(cuda_graphs=False)`.
RANGES_VARIABLE: Final = "DFLASH_GRAPH_NVTX"


@dataclass(frozen=True)
class Launch:
    """One bound step: `run()` returns what to store, in the order of `stored`, or None where it has
    stored it itself.
    """

    step: Step
    run: Callable[[], Sequence[Tensor] | None]
    stored: tuple[str, ...]
    views: tuple[Tensor, ...]


class Segment:
    """Bound steps of one schedule.

    Args:
        schedule: what runs.
        launches: its steps, bound.
    """

    def __init__(self, schedule: Schedule, launches: Sequence[Launch]) -> None:
        self.schedule = schedule
        self.launches = tuple(launches)
        self._in_ranges = ranges_asked() and any(
            view.is_cuda for launch in self.launches for view in launch.views
        )

    @torch.no_grad()
    def run(self, probe: Probe | None = None) -> None:
        """Run all steps in order; `probe` sees each step's stored values before a later step reuses
        their bytes.
        """
        if self._in_ranges and not torch.cuda.is_current_stream_capturing():
            nvtx = torch.cuda.nvtx
            self.run_in_ranges(nvtx.range_push, nvtx.range_pop, probe)
            return
        for launch in self.launches:
            self._run(launch, probe)

    def run_in_ranges(
        self,
        push: Callable[[str], object],
        pop: Callable[[], object],
        probe: Probe | None = None,
    ) -> None:
        """Run all steps in order within nested ranges: the segment, the parts of each region, the
        step.

        Args:
            push: opens a range of a name inside those that are open.
            pop: closes the innermost.
            probe: as in `run`.
        """
        open_ranges: list[str] = []

        def lead_to(path: Sequence[str]) -> None:
            shared = len(_common(open_ranges, path))
            while len(open_ranges) > shared:
                open_ranges.pop()
                pop()
            for part in path[shared:]:
                push(part)
                open_ranges.append(part)

        segment = self.schedule.graph.key.segment
        try:
            for launch in self.launches:
                lead_to((segment, *_region_parts(launch.step)))
                push(launch.step.name)
                try:
                    self._run(launch, probe)
                finally:
                    pop()
        finally:
            lead_to(())

    def _run(self, launch: Launch, probe: Probe | None) -> None:
        results = launch.run()
        if results is not None:
            for view, value in zip(launch.views, results, strict=True):
                view.copy_(value)
        if probe is not None:
            probe(launch.step, dict(zip(launch.stored, launch.views, strict=True)))


def ranges_asked() -> bool:
    """Whether `DFLASH_GRAPH_NVTX` asks for ranges.

    Raises:
        OptionError: it is neither 0 nor 1.
    """
    found = os.environ.get(RANGES_VARIABLE, "")
    if found not in ("", "0", "1"):
        raise OptionError(f"{RANGES_VARIABLE}: expected 0 or 1, got {found!r}")
    return found == "1"


def _region_parts(step: Step) -> tuple[str, ...]:
    """The region of a single op; what a traced step's nodes share."""
    paths = [tuple(filter(None, node.region.split("/"))) for node in step.nodes]
    return reduce(_common, paths)


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[str, ...]:
    """What two paths begin with."""
    pairs = zip(left, right, strict=False)
    return tuple(part for part, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def bind_op(node: Node, tensors: Mapping[str, Tensor]) -> Callable[[], Sequence[Tensor]]:
    """A call of the op's reference with its arguments resolved."""
    arguments: dict[str, Any] = {
        argument: tensors[names] if isinstance(names, str) else [tensors[name] for name in names]
        for argument, names in node.inputs.items()
    }
    arguments.update(node.attributes)
    reference = node.contract.reference

    def run() -> Sequence[Tensor]:
        results = reference(**arguments)
        if results is None:
            return ()
        return results if isinstance(results, tuple) else (results,)

    return run


def bind_step(schedule: Schedule, index: int, tensors: Mapping[str, Tensor]) -> Launch:
    """Bind a single-op step."""
    step = schedule.steps[index]
    (node,) = step.nodes
    stored = tuple(node.outputs.values())
    return Launch(step, bind_op(node, tensors), stored, tuple(tensors[name] for name in stored))
