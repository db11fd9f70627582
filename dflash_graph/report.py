"""report: what memory a configuration takes, as JSON-ready dicts and as plain text tables.

Everything is computed from declared graphs, before any weight is read or any device touched, by the
same plans that are allocated later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dflash_graph.choices import Choices
from dflash_graph.frame import input_layout, output_layout
from dflash_graph.graph import Backend, Graph
from dflash_graph.lowering.schedules import lowered
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import (
    declare_startup,
    declare_state,
)
from dflash_graph.passes.combine import combine
from dflash_graph.planner import Plan, plan
from dflash_graph.state import Capacities, StatePlan, plan_state
from dflash_graph.tensor import WeightUse

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB")
_NUMBER: Final = frozenset("0123456789")
#: Ops that commit recurrent state from the records of a round.
_COMMITS: Final = ("gdn_fold", "gdn_commit", "conv_history_commit")


def size_text(nbytes: int) -> str:
    """A number of bytes for people: `"40.00 MiB"`."""
    size, unit = float(nbytes), "B"
    for larger in _UNITS:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"


def plan_dict(plan: Plan) -> dict[str, Any]:
    """An arena plan as JSON-ready values; sizes in bytes, lives as step numbers with names."""
    return {
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound,
        "ratio": plan.ratio,
        "retained_bytes": retained_bytes(plan),
        "steps": len(plan.steps),
        "segments": list(plan.boundaries),
        "buffers": [
            {
                "values": list(buffer.values),
                "offset": buffer.offset,
                "nbytes": buffer.nbytes,
                "first": buffer.first,
                "first_step": plan.steps[buffer.first],
                "last": buffer.last,
                "last_step": plan.steps[buffer.last],
            }
            for buffer in plan.buffers
        ],
    }


def plan_text(plan: Plan) -> str:
    """An arena plan as text: the totals, then a line a buffer in order of offset.

    A buffer is made by the step of its first value; `->` leads to results that take its place.
    """
    facts = plan_dict(plan)
    rows = [
        (
            str(buffer["offset"]),
            str(buffer["nbytes"]),
            size_text(buffer["nbytes"]),
            f"{buffer['first']}-{buffer['last']}",
            _chain(buffer["values"]),
            buffer["last_step"],
        )
        for buffer in facts["buffers"]
    ]
    head = ("offset", "bytes", "size", "steps", "values", "last step")
    return (
        f"arena {_both(plan.arena_bytes)}, lower bound {_both(plan.lower_bound)}, "
        f"ratio {plan.ratio:.4f}\n"
        f"{len(plan.buffers)} buffers over {len(plan.steps)} steps; "
        f"retained from one segment to the next: {_both(facts['retained_bytes'])}\n\n"
        + text_table(head, rows)
    )


def retained_bytes(plan: Plan) -> int:
    """Bytes of the buffers that a later segment still reads."""
    starts = plan.boundaries[1:]
    return sum(
        buffer.nbytes
        for buffer in plan.buffers
        if any(buffer.first < start <= buffer.last for start in starts)
    )


def state_dict(state: StatePlan, capacities: Capacities) -> dict[str, Any]:
    """State pools by kind as JSON-ready values, in bytes.

    `unit_bytes` is one slot or page over all layers, `request_bytes` what one request holds at full
    context. `nbytes` of the whole includes the alignment of each pool.
    """
    numbers = capacities.bindings()
    kinds = [
        {
            "kind": kind,
            "unit": unit,
            "unit_bytes": one,
            "units": numbers[f"{unit}s"],
            "request_bytes": one * (1 if unit == "slot" else capacities.request_pages),
            "nbytes": total,
        }
        for kind, (unit, one, total) in state.kinds().items()
    ]
    return {
        "slots": capacities.slots,
        "context": capacities.context,
        "pages": numbers["pages"],
        "kinds": kinds,
        "request_bytes": sum(kind["request_bytes"] for kind in kinds),
        "nbytes": state.nbytes,
    }


def state_text(state: StatePlan, capacities: Capacities) -> str:
    """State pools by kind as a text table."""
    facts = state_dict(state, capacities)
    rows = [
        (
            kind["kind"],
            f"{kind['units']} {kind['unit']}s",
            size_text(kind["unit_bytes"]),
            size_text(kind["request_bytes"]),
            size_text(kind["nbytes"]),
            str(kind["nbytes"]),
        )
        for kind in facts["kinds"]
    ]
    total = ("total", "", "", size_text(facts["request_bytes"]), size_text(facts["nbytes"]))
    head = ("state", "pool", "per unit", f"a request of {capacities.context}", "in all", "bytes")
    return text_table(head, [*rows, (*total, str(facts["nbytes"]))])


def record_bytes(finish: Graph) -> int:
    """Bytes of the records that a round keeps of one column of one request, over all layers: what
    the commit of recurrent state reads of them in the backend's own graph.

    Args:
        finish: the round's second segment, as declared.
    """
    graph = combine(finish)
    records = dict.fromkeys(
        name
        for node in graph.nodes
        if node.op in _COMMITS
        for _, name in node.operands()
        if graph.values[name].role == "retained"
    )
    nbytes = sum(graph.values[name].spec.nbytes() for name in records)
    return nbytes // (finish.key.batch * finish.key.columns)


def storages(uses: Iterable[WeightUse]) -> tuple[WeightUse, ...]:
    """The uses that need storage of their own; the others are views of these.

    A use is a view if its parts are a contiguous run of another's of the same dtype.
    """
    kept: list[WeightUse] = []
    holders: dict[tuple[str, str], list[WeightUse]] = {}  # (dtype, part) -> kept uses with it
    for use in sorted(dict.fromkeys(uses), key=lambda use: -len(use.parts)):
        dtype, count = use.spec.dtype, len(use.parts)
        is_view = any(
            holder.parts[start : start + count] == use.parts
            for holder in holders.get((dtype, use.parts[0]), ())
            for start in range(len(holder.parts) - count + 1)
        )
        if not is_view:
            kept.append(use)
            for part in use.parts:
                holders.setdefault((dtype, part), []).append(use)
    return tuple(kept)


def weight_bytes(uses: Iterable[WeightUse]) -> dict[str, int]:
    """Bytes of weights by owner (`"target"`, `"draft"`); what two uses share counts once."""
    totals: dict[str, int] = {}
    for use in storages(uses):
        owner = use.parts[0].partition("/")[0]
        totals[owner] = totals.get(owner, 0) + use.spec.nbytes()
    return totals


@dataclass(frozen=True)
class ExecutorMemory:
    """What one executor needs: its arena plan, and its frames in bytes (input, result)."""

    name: str
    plan: Plan
    frames: tuple[int, int]


@dataclass(frozen=True)
class MemoryReport:
    """Everything a configuration allocates.

    Args:
        weights: bytes by owner.
        state: pools.
        capacities: what the pools are sized for.
        executors: one per batch size, then prefill and the first token; they share one arena.
        record_bytes: records of one column of one request; they lie in the arena.
    """

    weights: dict[str, int]
    state: StatePlan
    capacities: Capacities
    executors: tuple[ExecutorMemory, ...]
    record_bytes: int

    @property
    def arena_bytes(self) -> int:
        """The one arena: as large as the largest executor needs."""
        return max(executor.plan.arena_bytes for executor in self.executors)

    @property
    def frame_bytes(self) -> int:
        return sum(sum(executor.frames) for executor in self.executors)

    @property
    def total_bytes(self) -> int:
        return sum(self.weights.values()) + self.state.nbytes + self.arena_bytes + self.frame_bytes


def plan_memory(
    pair: ModelPair,
    backend: Backend,
    *,
    draft_tokens: int,
    max_batch: int,
    prefill_chunk: int,
    capacities: Capacities,
    choices: Choices | None = None,
) -> MemoryReport:
    """Plan everything that serving a pair allocates.

    Args:
        pair: target and draft.
        backend: the lowering of rounds.
        draft_tokens: K; 0 for plain decoding.
        max_batch: rounds are planned for every B from 1 to this.
        prefill_chunk: tokens of a prefill chunk.
        capacities: slots, context and pages of the state.
        choices: of the device that kernels are for; they decide about workspace.

    Raises:
        OptionError: a number is out of range.
        UnsupportedModelError: the target has no graph yet.
    """
    segments = declare_startup(
        pair,
        backend,
        draft_tokens=draft_tokens,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
    )
    return startup_memory(pair, segments, draft_tokens + 1, capacities, choices)


def startup_memory(
    pair: ModelPair,
    segments: Mapping[str, tuple[Graph, ...]],
    columns: int,
    capacities: Capacities,
    choices: Choices | None = None,
) -> MemoryReport:
    """The report of segments that `declare_startup` gave.

    Args:
        pair: target and draft.
        segments: by executor.
        columns: W.
        capacities: slots, context and pages of the state.
        choices: of the device that kernels are for.
    """
    return MemoryReport(
        weights=weight_bytes(
            value.weight
            for graphs in segments.values()
            for graph in map(combine, graphs)
            for value in graph.by_role("weight")
            if value.weight is not None
        ),
        state=plan_state(declare_state(pair, columns), capacities),
        capacities=capacities,
        executors=tuple(
            _executor_memory(name, graphs, capacities, choices) for name, graphs in segments.items()
        ),
        record_bytes=record_bytes(segments["round B=1"][-1]),
    )


def memory_dict(report: MemoryReport) -> dict[str, Any]:
    """A memory report as JSON-ready values, in bytes."""
    return {
        "total_bytes": report.total_bytes,
        "weights": {**report.weights, "nbytes": sum(report.weights.values())},
        "state": state_dict(report.state, report.capacities),
        "arena_bytes": report.arena_bytes,
        "frame_bytes": report.frame_bytes,
        "record_bytes_per_column": report.record_bytes,
        "executors": [
            {
                "name": executor.name,
                "arena_bytes": executor.plan.arena_bytes,
                "lower_bound_bytes": executor.plan.lower_bound,
                "ratio": executor.plan.ratio,
                "retained_bytes": retained_bytes(executor.plan),
                "input_frame_bytes": executor.frames[0],
                "result_frame_bytes": executor.frames[1],
            }
            for executor in report.executors
        ],
    }


def memory_text(report: MemoryReport) -> str:
    """A memory report as text: totals, state pools, executors."""
    totals = [
        *((f"weights of the {owner}", nbytes) for owner, nbytes in report.weights.items()),
        ("state", report.state.nbytes),
        ("arena, shared by all executors", report.arena_bytes),
        ("frames", report.frame_bytes),
        ("total", report.total_bytes),
    ]
    executors = [
        (
            executor.name,
            size_text(executor.plan.arena_bytes),
            f"{executor.plan.ratio:.4f}",
            size_text(retained_bytes(executor.plan)),
            size_text(sum(executor.frames)),
        )
        for executor in report.executors
    ]
    return "\n".join(
        (
            text_table(
                ("memory", "size", "bytes"),
                [(name, size_text(nbytes), str(nbytes)) for name, nbytes in totals],
            ),
            state_text(report.state, report.capacities),
            text_table(("executor", "arena", "peak / bound", "retained", "frames"), executors),
            f"records (in the arena): {_both(report.record_bytes)} a column of a request\n",
        )
    )


def _executor_memory(
    name: str, graphs: Sequence[Graph], capacities: Capacities, choices: Choices | None
) -> ExecutorMemory:
    numbers = capacities.bindings()
    frames = input_layout(graphs, numbers).nbytes, output_layout(graphs, numbers).nbytes
    return ExecutorMemory(name, plan([lowered(graph, choices) for graph in graphs]), frames)


def _chain(values: Sequence[str]) -> str:
    """The values of one buffer: all of a pair, the ends of a longer chain of in-place results."""
    if len(values) <= 2:
        return " -> ".join(values)
    return f"{values[0]} -> {len(values) - 2} more -> {values[-1]}"


def _both(nbytes: int) -> str:
    text = size_text(nbytes)
    return text if text.endswith(" B") else f"{text} ({nbytes} B)"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under headings; those whose cells begin with a number are set right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [all(cell[:1] in _NUMBER for cell in column[1:] if cell) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join(lines) + "\n"
