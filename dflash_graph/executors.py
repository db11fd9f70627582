"""executors: a planned, bound round for one exact batch size, and the prefill chunks beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_graph.capture import capture
from dflash_graph.choices import Choices
from dflash_graph.errors import OptionError
from dflash_graph.frame import Frame, FrameLayout, input_layout, output_layout
from dflash_graph.graph import Graph
from dflash_graph.lowering import eager, inductor, library, triton
from dflash_graph.lowering.schedules import lowered
from dflash_graph.lowering.segment import Probe, Segment
from dflash_graph.op import dtype_of
from dflash_graph.pace import Pace
from dflash_graph.passes.check import check_segments
from dflash_graph.passes.schedule import Schedule
from dflash_graph.planner import Plan, plan
from dflash_graph.state import Capacities
from dflash_graph.tensor import WeightUse

#: How a bound schedule runs; ``library`` takes eager graphs, for prefill on a device.
Lowering = Literal["eager", "inductor", "triton", "library"]
_LOWERINGS: Mapping[str, Callable[[Schedule, Mapping[str, Tensor]], Segment]] = {
    "eager": eager.bind,
    "inductor": inductor.bind,
    "library": library.bind,
    "triton": triton.bind,
}


#: Bytes of weights that the last part of a segment reads.
_TAIL_BYTES = 1 << 30


@dataclass(frozen=True)
class Compiled:
    """Segments that were checked, scheduled and planned together; still without a device.

    Args:
        schedules: one per segment, in running order.
        plan: the arena they share.
        inputs: layout of the one input frame.
        outputs: layout of the one result frame.
    """

    schedules: tuple[Schedule, ...]
    plan: Plan
    inputs: FrameLayout
    outputs: FrameLayout

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return tuple(schedule.graph for schedule in self.schedules)


def compile_segments(
    segments: Sequence[Graph], capacities: Capacities, choices: Choices | None = None
) -> Compiled:
    """Check, combine, schedule, fuse and plan segments that run one after another. Needs no device
    and no weights.

    Args:
        segments: graphs in running order.
        capacities: numbers of capacity names.
        choices: of the device that kernels are for.
    """
    check_segments(segments)
    schedules = tuple(lowered(graph, choices) for graph in segments)
    check_segments([schedule.graph for schedule in schedules])
    bindings = capacities.bindings()
    return Compiled(
        schedules,
        plan(schedules),
        input_layout(segments, bindings),
        output_layout(segments, bindings),
    )


class Executor:
    """Compiled segments bound to an arena, frames, weights and state.

    Args:
        compiled: what to bind.
        arena: `uint8`, at least `compiled.plan.arena_bytes`; shared with other executors, which
            never run between two segments of one round.
        weights: weight of each use.
        state: state tensors by name.
        backend: which lowering.
    """

    def __init__(
        self,
        compiled: Compiled,
        arena: Tensor,
        weights: Mapping[WeightUse, Tensor],
        state: Mapping[str, Tensor],
        backend: Lowering,
    ) -> None:
        if backend not in _LOWERINGS:
            raise OptionError(f"lowering: expected one of {sorted(_LOWERINGS)}, got {backend!r}")
        self.compiled = compiled
        self.arena = arena
        self.inputs = Frame(compiled.inputs, arena.device)
        self.outputs = Frame(compiled.outputs, arena.device)
        #: The input frame of each segment; later ones may be filled while the first is copied.
        self.frames = (self.inputs, *(self.inputs.twin() for _ in compiled.graphs[1:]))
        self.tensors: dict[str, Tensor] = {}
        offsets = compiled.plan.offsets()
        for graph in compiled.graphs:
            for value in graph.values.values():
                if value.name in self.tensors:
                    continue
                if value.weight is not None:
                    self.tensors[value.name] = weights[value.weight]
                elif value.role == "state":
                    self.tensors[value.name] = state[value.name]
                elif value.role == "input":
                    self.tensors[value.name] = self.inputs.bound(value.name)
                elif value.role == "output":
                    self.tensors[value.name] = self.outputs.bound(value.name)
                elif value.name in offsets:
                    offset, nbytes = offsets[value.name], value.spec.nbytes()
                    view = arena[offset : offset + nbytes].view(dtype_of(value.spec.dtype))
                    self.tensors[value.name] = view.view(value.spec.bind({}))
        for schedule in compiled.schedules:
            for index, nbytes in enumerate(schedule.workspace):
                name = schedule.workspace_name(index)
                if nbytes:
                    self.tensors[name] = arena[offsets[name] : offsets[name] + nbytes]
        bind = _LOWERINGS[backend]
        self.segments = tuple(bind(schedule, self.tensors) for schedule in compiled.schedules)
        self._returns = tuple(bool(graph.by_role("output")) for graph in compiled.graphs)
        #: Of each segment, the graphs of its parts.
        self._captured: tuple[tuple[torch.cuda.CUDAGraph, ...], ...] = ()
        #: Where the last part of the segment that is run begins, and its end.
        self._moments: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        #: How often the first segment ran.
        self.runs = 0
        self._pace = Pace()

    def run(
        self,
        index: int = 0,
        probe: Probe | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Run one segment over what its input frame holds; its results are in the result frame.

        With a probe the launches run one by one, also where the segment is captured.

        Args:
            index: of the segment.
            probe: sees what each step stored.
            meanwhile: for the host to call shortly before a device is done with a captured
                segment that is long enough.
        """
        if probe is None:
            self.run_queued(index)
        else:
            self.runs += not index
            self._launch(index, probe)
        if self._returns[index] and self.arena.is_cuda:
            if meanwhile is None or probe is not None or self._moments is None:
                torch.cuda.current_stream().synchronize()
            else:
                self._moments[1].record()
                self._pace.wait(*self._moments, meanwhile)

    def run_queued(self, index: int = 0) -> None:
        """Queue one segment on the current stream and wait for nothing."""
        self.runs += not index
        if self._captured:
            *first, last = self._captured[index]
            for part in first:
                part.replay()
            if first and self._moments is not None:
                self._moments[0].record()
            last.replay()
        else:
            self._launch(index)

    @torch.no_grad()
    def capture(self, stream: torch.cuda.Stream) -> None:
        """Make each segment a CUDA Graph, or one for each of its parts: the frame's copy, its
        launches, the results' copy.

        Raises:
            PlanError: a launch allocated memory.
        """
        self._captured = tuple(
            tuple(capture(part, stream, str(graph.key)) for part in self._parts(index))
            for index, graph in enumerate(self.compiled.graphs)
        )
        if len(self._captured[0]) > 1:
            self._moments = torch.cuda.Event(), torch.cuda.Event()

    @property
    def is_captured(self) -> bool:
        """Whether segments are replayed as CUDA Graphs."""
        return bool(self._captured)

    def _launch(self, index: int, probe: Probe | None = None) -> None:
        self.frames[index].upload()
        self.segments[index].run(probe)
        if self._returns[index]:
            self.outputs.download()

    def _parts(self, index: int) -> tuple[Callable[[], None], ...]:
        """What the graphs of a segment launch, one after another."""
        return (partial(self._launch, index),)

    def poison(self) -> None:
        """Fill the arena with bytes that read as NaN, and as impossible integers."""
        self.arena.fill_(0xFF)


def tail(schedule: Schedule) -> int:
    """The last step from which on a segment reads at least 1 GiB of weights: some tenths of a
    millisecond before its end. 0 where all of it reads less.
    """
    values = schedule.graph.values
    left = _TAIL_BYTES
    for index in reversed(range(len(schedule.steps))):
        names = schedule.inputs(index)
        left -= sum(values[name].spec.nbytes() for name in names if values[name].role == "weight")
        if left <= 0:
            return index
    return 0


class RoundExecutor(Executor):
    """One exact-B round: `forward` proposes, verifies and accepts, `finish` commits.

    Captured, a forward that reads much is cut in two shortly before its end.
    """

    @property
    def batch(self) -> int:
        return self.compiled.graphs[0].key.batch

    def forward(
        self,
        frame: Mapping[str, Any],
        probe: Probe | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Frame:
        """Run materialize, propose, verify and accept.

        Args:
            frame: input frame fields (see `dflash_graph.models.round`); those left out keep their
                value.
            probe, meanwhile: see `run`.

        Returns:
            The result frame: `verify/ids` `[B, W]`, `accept/greedy.accepted`, `.licensed`,
                `.finite` `[B]` and
            `.outputs` `[B, W]`, int32; valid until the next forward.
        """
        self.inputs.fill(**frame)
        self.run(0, probe, meanwhile)
        return self.outputs

    def _parts(self, index: int) -> tuple[Callable[[], None], ...]:
        segment = self.segments[index]
        cut = tail(segment.schedule) if self._returns[index] else 0
        if not cut:
            return super()._parts(index)
        first = Segment(segment.schedule, segment.launches[:cut])
        last = Segment(segment.schedule, segment.launches[cut:])

        def begin() -> None:
            self.frames[index].upload()
            first.run()

        def end() -> None:
            last.run()
            self.outputs.download()

        return begin, end

    @property
    def law(self) -> str:
        """Name of the node that accepted: what the result frame's fields begin with."""
        return "accept/sampled" if "accept/sampled.outputs" in self.outputs else "accept/greedy"

    def finish(
        self,
        committed: Sequence[int] | Tensor,
        published: Sequence[Sequence[int]] | Tensor | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Commit the first `committed[b]` columns of each request (0 leaves its state untouched).

        Args:
            committed: N of each request.
            published: `[B, W]` outputs that enter the token counts, for a sampling round; those
                that the round returned if None.
        """
        frame = self.frames[1]
        if frame is not self.inputs:
            frame.take(self.inputs)
        frame.fill(committed=committed)
        if "published" in frame:
            frame.fill(
                published=self.outputs[f"{self.law}.outputs"] if published is None else published
            )
        self.run(1, probe)


class StillExecutor(RoundExecutor):
    """The host's side of a round executor: frames of its own, and nothing that runs.

    Args:
        of: whose frames they are like.
    """

    def __init__(self, of: RoundExecutor) -> None:
        self.compiled = of.compiled
        self.inputs = Frame(of.compiled.inputs)
        self.outputs = Frame(of.compiled.outputs)
        self.frames = (self.inputs, *(Frame(of.compiled.inputs) for _ in of.compiled.graphs[1:]))
        self._returns = (False,) * len(self.frames)  # nothing to wait for

    def run_queued(self, index: int = 0) -> None:
        """Do nothing."""


def new_arena(plans: Sequence[Plan], device: str | torch.device) -> Tensor:
    """One arena that fits the largest of several plans, poisoned."""
    nbytes = max((plan.arena_bytes for plan in plans), default=0)
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
