"""Tasks: the distinct products, heads and other families that a start-up's rounds launch.

A family is an op with its dtype and sizes, without the number of rows; a task is a family, or those
that share a choice, with one call for each row tile that they occur in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_graph.autotune.spaces import Candidate, Space, space_of, tuned_ops
from dflash_graph.choices import Choices, Entry, Variation
from dflash_graph.errors import OptionError
from dflash_graph.graph import Graph, Node
from dflash_graph.kernels import (
    KernelCase,
    completed_choice,
    device_choice,
    kernel_case,
    row_tile,
)
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_startup
from dflash_graph.op import Attribute, Sizes, Specs
from dflash_graph.ops import get_op
from dflash_graph.passes.combine import combine
from dflash_graph.tensor import TensorSpec


@dataclass(frozen=True)
class Call:
    """A call whose row tile is `rows`: the one with most rows that rounds make.

    Args:
        launches: of such calls in one round.
        sizes: bound symbols and attributes.
    """

    op: str
    rows: int
    launches: int
    specs: Mapping[str, Specs]
    attributes: Mapping[str, Attribute]
    sizes: Sizes
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.op}/{self.rows}"

    def case(self, candidate: Candidate) -> KernelCase:
        """The kernel of a candidate."""
        found = kernel_case(
            self.op,
            self.specs,
            self.attributes,
            choice=candidate.choice(self.rows),
            model_dtype=self.dtype,
        )
        assert found is not None, f"{self.op} has no kernel for this call"
        return found


@dataclass(frozen=True)
class Part:
    """One op of a task: what its entry is keyed by, and its calls by row tile."""

    op: str
    key: Mapping[str, Any]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Task:
    """What one measured choice is for."""

    space: Space
    dtype: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """For people and journals: ops and sizes."""
        parts = (
            f"{part.op} {' '.join(f'{name}={value}' for name, value in part.key.items())}"
            for part in self.parts
        )
        return f"{' + '.join(parts)} {self.dtype}"

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for part in self.parts for call in part.calls)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the first call; a space looks at what all have in common."""
        return self.calls[0].sizes

    @property
    def buckets(self) -> tuple[int, ...]:
        return tuple(sorted({call.rows for call in self.calls}))

    @property
    def weight(self) -> int:
        """Bytes that the calls of a round move: what is worth most is tuned first."""
        return max(_traffic(call) * call.launches for call in self.calls)

    def incumbent(self, choices: Choices | None) -> Candidate:
        """What runs now: the device's choice or the template's default."""
        first = self.calls[0]
        held = {
            call.rows: device_choice(call.op, call.sizes, call.dtype, call.rows, choices)
            for call in reversed(self.calls)
        }
        common = held[first.rows]
        stages = {rows: choice.num_stages for rows, choice in held.items()}
        own: dict[int, Variation] = {}
        entry = choices.entry(first.op, first.sizes, first.dtype) if choices else None
        if entry is not None:
            plain = replace(common, tiles=entry.tiles, num_warps=entry.num_warps)
            common = completed_choice(plain, first.op, first.sizes, first.dtype)
            own = {rows: one for rows, one in entry.variations.items() if rows in stages}
        return Candidate.make(common.tiles, common.num_warps, stages, common.pdl, own)

    def entries(
        self,
        candidate: Candidate,
        *,
        templates: Mapping[str, str | None],
        versions: Mapping[str, str],
        evidence: Mapping[str, Any],
    ) -> tuple[Entry, ...]:
        """What a store keeps of a winner: an entry for each op."""
        stages = dict(candidate.num_stages)
        return tuple(
            Entry(
                op=part.op,
                dtype=self.dtype,
                sizes=dict(part.key),
                tiles=dict(candidate.tiles),
                num_warps=candidate.num_warps,
                num_stages={call.rows: stages[call.rows] for call in part.calls},
                variations=candidate.variations,
                pdl=candidate.pdl,
                template=templates[part.op],
                versions=dict(versions),
                evidence=dict(evidence),
            )
            for part in self.parts
        )


def _traffic(call: Call) -> int:
    return (
        get_op(call.op)
        .cost(
            {name: _static(spec) for name, spec in call.specs.items()},
            call.attributes,
            context=2048,
            model_dtype=call.dtype,
        )
        .bytes
    )


def _static(specs: Specs) -> Specs:
    """Specs with some number for every capacity: traffic does not depend on them."""
    if not isinstance(specs, TensorSpec):
        return tuple(_static_spec(spec) for spec in specs)
    return _static_spec(specs)


def _static_spec(spec: TensorSpec) -> TensorSpec:
    return TensorSpec(tuple(a if isinstance(a, int) else 64 for a in spec.shape), spec.dtype)


def find_tasks(
    pair: ModelPair, *, draft_tokens: int, max_batch: int, ops: Sequence[str] = ()
) -> tuple[Task, ...]:
    """The tasks of a start-up, that which moves most bytes first.

    Args:
        pair: geometry.
        draft_tokens: K.
        max_batch: rounds of every B from 1 to this.
        ops: only tasks with one of these; all if empty.

    Raises:
        OptionError: an op has no space.
    """
    for op in ops:
        if space_of(op) is None:
            raise OptionError(f"op: expected one of {', '.join(tuned_ops())}, got {op!r}")
    segments = declare_startup(
        pair, "triton", draft_tokens=draft_tokens, max_batch=max_batch, prefill_chunk=1
    )
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Call]]] = defaultdict(dict)
    for graphs in segments.values():
        for call, launches in _counted(graphs):
            space = space_of(call.op)
            assert space is not None
            shared = tuple(call.sizes[name] for name in space.shares.get(call.op, ()))
            key = tuple((name, call.sizes[name]) for name in space.keys[call.op])
            group = groups[(*space.keys, call.dtype, shared or key)]
            group.setdefault((call.op, key), []).append(_with(call, launches))
    found = []
    for group in groups.values():
        parts = tuple(Part(op, dict(key), _largest(calls)) for (op, key), calls in group.items())
        space = space_of(parts[0].op)
        assert space is not None
        found.append(Task(space, parts[0].calls[0].dtype, parts))
    wanted = [t for t in found if not ops or any(part.op in ops for part in t.parts)]
    return tuple(sorted(wanted, key=lambda task: (-task.weight, task.name)))


def _counted(graphs: Sequence[Graph]) -> Iterator[tuple[Call, int]]:
    """Distinct calls of one executor and how often it makes them."""
    counts: dict[str, tuple[Call, int]] = {}
    for graph in map(combine, graphs):
        if graph.key.backend != "triton":
            continue
        for node in graph.nodes:
            call = _call(graph, node)
            if call is not None:
                text = f"{call.op} {sorted(call.specs.items())} {sorted(call.attributes.items())}"
                seen = counts.get(text)
                counts[text] = (call, 1 + (seen[1] if seen else 0))
    yield from counts.values()


def _call(graph: Graph, node: Node) -> Call | None:
    if space_of(node.op) is None:
        return None
    specs = graph.specs(node)
    dtype = graph.key.dtype
    if kernel_case(node.op, specs, node.attributes, model_dtype=dtype) is None:
        return None
    symbols, dtype = get_op(node.op).bind(specs, node.attributes, model_dtype=dtype)
    sizes = Sizes({**node.attributes, **symbols.sizes()})
    return Call(node.op, row_tile(node.op, sizes), 1, specs, node.attributes, sizes, dtype)


def _with(call: Call, launches: int) -> Call:
    return Call(call.op, call.rows, launches, call.specs, call.attributes, call.sizes, call.dtype)


def _largest(calls: Sequence[Call]) -> tuple[Call, ...]:
    """For each row tile the call with most launches, then most rows."""
    best: dict[int, Call] = {}
    for call in calls:
        held = best.get(call.rows)
        if held is None or _size(call) > _size(held):
            best[call.rows] = call
    return tuple(best[rows] for rows in sorted(best))


def _size(call: Call) -> tuple[int, int, int]:
    batch, columns = call.sizes.get("B", 1), call.sizes.get("W", 1)
    return call.launches, batch * columns, columns
