"""build: the profile of declared graphs, or of rounds that were started.

`declared_profile` needs no weights and no device: graphs, kernels' choices, plans and floors.
`started_profile` adds what a start-up knows, and times where somebody measured them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from dflash_graph.choices import Choices
from dflash_graph.executors import Compiled, Lowering, compile_segments
from dflash_graph.graph import Backend, Graph, Node
from dflash_graph.kernels import KernelCase, node_case
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_startup, declare_state
from dflash_graph.op import Cost, Sizes
from dflash_graph.passes.schedule import Schedule, Step
from dflash_graph.planner import Plan
from dflash_graph.profile.acceptance import counts_of
from dflash_graph.profile.document import (
    BufferProfile,
    Ceiling,
    Config,
    DeviceIdentity,
    ExecutorProfile,
    Implementation,
    KernelResources,
    MemoryClass,
    NodeProfile,
    PlanProfile,
    Profile,
    Samples,
    SegmentProfile,
    Stage,
    ValueFacts,
)
from dflash_graph.profile.floors import bound_of, floor_us
from dflash_graph.profile.identity import device_of, identity_of, this_device
from dflash_graph.profile.measured import ExecutorTimes
from dflash_graph.report import weight_bytes
from dflash_graph.rounds import Rounds
from dflash_graph.state import Capacities, StatePlan, plan_state
from dflash_graph.statistics import Statistics

#: TB/s that floors stand on where nobody states or measures a ceiling: what an H200's memory gives
#: to loads.
READ_CEILING: Final = 4.6

#: Compiles one case: what its kernels take.
Resources = Callable[[KernelCase], tuple[KernelResources, ...]]


@dataclass(frozen=True)
class _Setting:
    """What all executors of a profile have in common."""

    context: int
    ceiling: Ceiling
    choices: Choices | None
    capacities: Mapping[str, int]
    resources: Resources | None = None


def declared_profile(
    pair: ModelPair,
    backend: Backend,
    *,
    name: str,
    draft_tokens: int,
    max_batch: int,
    max_context: int,
    prefill_chunk: int = 1024,
    context: int = 0,
    ceiling: Ceiling | None = None,
    choices: Choices | None = None,
    resources: Resources | None = None,
) -> Profile:
    """The profile of a start-up that nobody made yet.

    Args:
        pair: target and draft.
        backend: the lowering of rounds.
        name: of the pair, for people.
        draft_tokens: K; 0 for plain decoding.
        max_batch: executors are profiled for every B from 1 to this.
        max_context: tokens of a request.
        prefill_chunk: tokens of a prefill pass.
        context: tokens before the block that costs are for.
        ceiling: what floors stand on.
        choices: of the device that kernels are for.
        resources: compiles kernels; without it the profile says nothing of registers.

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
    capacities = Capacities(max_batch, max_context)
    ceiling = ceiling or Ceiling(read_tb_per_s=READ_CEILING)
    setting = _Setting(context, ceiling, choices, capacities.bindings(), resources)
    compiled = {
        label: compile_segments(graphs, capacities, choices) for label, graphs in segments.items()
    }
    device: DeviceIdentity = device_of(choices, "cuda" if backend == "triton" else "cpu")
    return Profile(
        identity=identity_of(
            pair,
            name=name,
            device=device,
            options={
                "lowering": backend,
                "draft_tokens": draft_tokens,
                "max_batch": max_batch,
                "max_context": max_context,
                "prefill_chunk": prefill_chunk,
                "dtype": pair.dtype,
                "context": context,
            },
            choices=choices,
        ),
        ceiling=ceiling,
        executors=tuple(
            _executor(label, found, setting, _lowering(found)) for label, found in compiled.items()
        ),
        memory=_planned_memory(
            plan_state(declare_state(pair, draft_tokens + 1), capacities),
            compiled.values(),
        ),
    )


def started_profile(
    rounds: Rounds,
    *,
    name: str,
    context: int = 0,
    ceiling: Ceiling | None = None,
    times: Mapping[str, ExecutorTimes] | None = None,
    statistics: Statistics | None = None,
    ms_per_round: float | None = None,
    resources: Resources | None = None,
) -> Profile:
    """The profile of rounds that were started.

    Args:
        rounds: compiled.
        name: of the pair, for people.
        context: tokens before the block that costs are for, and times if there are any.
        ceiling: what floors stand on.
        times: of executors that were timed, by name.
        statistics: of an engine that ran them.
        ms_per_round: wall time of one of its rounds.
        resources: compiles kernels.
    """
    pair = rounds.model.pair
    ceiling = ceiling or Ceiling(read_tb_per_s=READ_CEILING)
    setting = _Setting(context, ceiling, rounds.choices, rounds.capacities.bindings(), resources)
    bound = rounds.executors()
    is_cuda = rounds.arena.is_cuda
    executors = []
    for label, executor in bound.items():
        is_prefill = label.startswith("prefill")
        lowering = _lowering(executor.compiled)
        if is_prefill and is_cuda and rounds.backend != "eager":
            lowering = "library"
        known = _executor(label, executor.compiled, setting, lowering, (times or {}).get(label))
        cost = rounds.captures.get(label)
        executors.append(
            known.model_copy(
                update={
                    "captured": executor.is_captured,
                    "replays": executor.runs,
                    "capture_seconds": None if cost is None else cost.seconds,
                    "graph_bytes": None if cost is None else cost.nbytes,
                }
            )
        )
    loaded = rounds.model.load_seconds
    startup = {} if loaded is None else {"weights": loaded}
    return Profile(
        identity=identity_of(
            pair,
            name=name,
            device=this_device("cuda" if is_cuda else "cpu"),
            options={**rounds.options.model_dump(), "context": context},
            choices=rounds.choices,
        ),
        ceiling=ceiling,
        executors=tuple(executors),
        memory=_actual_memory(rounds),
        startup=tuple(
            Stage(name=stage, seconds=seconds)
            for stage, seconds in {**startup, **rounds.startup}.items()
        ),
        acceptance=None if statistics is None else counts_of(statistics, ms_per_round),
    )


def compiled_resources(capability: int) -> Resources:
    """Compiles kernels for a compute capability; needs triton, and minutes for a large pair."""
    from dflash_graph.ahead_of_time import compile_case

    known: dict[KernelCase, tuple[KernelResources, ...]] = {}

    def resources(case: KernelCase) -> tuple[KernelResources, ...]:
        if case not in known:
            known[case] = tuple(
                KernelResources(
                    kernel=found.kernel,
                    registers=found.registers,
                    shared_bytes=found.shared,
                    spill_bytes=found.local,
                )
                for found in compile_case(case, capability)
            )
        return known[case]

    return resources


def _lowering(compiled: Compiled) -> Lowering:
    """How an executor's segments run, but for prefill on a device."""
    return compiled.graphs[0].key.backend


def _executor(
    name: str,
    compiled: Compiled,
    setting: _Setting,
    lowering: Lowering,
    times: ExecutorTimes | None = None,
) -> ExecutorProfile:
    key = compiled.graphs[0].key
    segments = []
    for index, schedule in enumerate(compiled.schedules):
        first = compiled.plan.boundaries[index]
        segments.append(_segment(schedule, index, first, setting, lowering, times))
    return ExecutorProfile(
        name=name,
        batch=key.batch,
        columns=key.columns,
        context=setting.context,
        segments=tuple(segments),
        plan=_plan(compiled.plan),
        frame_bytes=compiled.inputs.nbytes + compiled.outputs.nbytes,
        measured=None if times is None else Samples(values=times.rounds),
    )


def _segment(
    schedule: Schedule,
    index: int,
    first: int,
    setting: _Setting,
    lowering: Lowering,
    times: ExecutorTimes | None,
) -> SegmentProfile:
    graph = schedule.graph
    costs = graph.cost(context=setting.context)
    makers = {
        value: node.name
        for step in schedule.steps
        for node in step.nodes
        for value in node.outputs.values()
    }
    nodes = []
    for at, step in enumerate(schedule.steps):
        samples = None if times is None else times.steps.get((index, at))
        shares = _shares(step, costs, setting.ceiling)
        for node, share in zip(step.nodes, shares, strict=True):
            own = None
            if samples is not None:
                own = Samples(values=tuple(value * share for value in samples))
            nodes.append(
                _node(
                    graph, node, step, first + at, costs[node.name], makers, setting, lowering, own
                )
            )
    return SegmentProfile(
        name=graph.key.segment,
        graph_hash=graph.content_hash,
        first_step=first,
        nodes=tuple(nodes),
        measured=None if times is None else Samples(values=times.segments[index]),
        host_syncs=times.host_syncs[index] if times is not None and times.host_syncs else None,
    )


def _shares(step: Step, costs: Mapping[str, Cost], ceiling: Ceiling) -> list[float]:
    """How the time of a step is divided among its nodes: by floor."""
    own = [costs[node.name] for node in step.nodes]
    floors = [floor_us(cost.bytes, cost.flops, ceiling) for cost in own]
    total = sum(floors)
    return [floor / total if total else 1 / len(floors) for floor in floors]


def _node(
    graph: Graph,
    node: Node,
    step: Step,
    number: int,
    cost: Cost,
    makers: Mapping[str, str],
    setting: _Setting,
    lowering: Lowering,
    samples: Samples | None,
) -> NodeProfile:
    case = node_case(graph, node, setting.choices) if lowering == "triton" else None
    inputs = {makers[name]: None for _, name in node.operands() if name in makers}
    return NodeProfile(
        name=node.name,
        region=node.region,
        op=node.op,
        step=number,
        implementation=_implementation(step, lowering),
        traced=step.kind == "traced",
        inputs=tuple(inputs),
        outputs=tuple(_value(graph, name, setting.capacities) for name in node.outputs.values()),
        weights=_weights(graph, node),
        config=None if case is None else _config(case),
        source=_source(graph, node, case, setting.choices),
        resources=(
            setting.resources(case) if case is not None and setting.resources is not None else ()
        ),
        read_bytes=cost.read_bytes,
        write_bytes=cost.write_bytes,
        flops=cost.flops,
        floor_us=floor_us(cost.bytes, cost.flops, setting.ceiling),
        measured=samples,
        bound=bound_of(
            cost.bytes,
            cost.flops,
            setting.ceiling,
            None if samples is None else samples.median,
        ),
    )


def _implementation(step: Step, lowering: Lowering) -> Implementation:
    if lowering == "inductor" and step.kind != "traced":
        return "eager"  # opaque ops run their references
    return lowering


def _value(graph: Graph, name: str, capacities: Mapping[str, int]) -> ValueFacts:
    value = graph.values[name]
    return ValueFacts(
        name=name,
        shape=tuple(value.spec.shape),
        dtype=value.spec.dtype,
        nbytes=value.spec.nbytes(capacities),
        role=value.role,
    )


def _weights(graph: Graph, node: Node) -> tuple[str, ...]:
    """Tensors of a checkpoint that a node reads whole; tables that are read by rows are none."""
    found: dict[str, None] = {}
    for argument, name in node.operands():
        value = graph.values[name]
        is_table = argument in node.contract.reads and not node.op.startswith("head_")
        if value.weight is not None and not is_table:
            found.update(dict.fromkeys(value.weight.parts))
    return tuple(found)


def _config(case: KernelCase) -> Config:
    return Config(
        template=case.template,
        holes=dict(case.holes),
        num_warps=case.num_warps,
        num_stages=case.num_stages,
    )


def _source(graph: Graph, node: Node, case: KernelCase | None, choices: Choices | None) -> str:
    """Where a node's choice comes from: the entry's profile, else the template's default."""
    if case is None or choices is None:
        return "default"
    symbols, dtype = node.contract.bind(
        graph.specs(node), node.attributes, model_dtype=graph.key.dtype
    )
    found = choices.entry(node.op, Sizes({**node.attributes, **symbols.sizes()}), dtype)
    return "default" if found is None else found.source or choices.source


def _plan(plan: Plan) -> PlanProfile:
    return PlanProfile(
        arena_bytes=plan.arena_bytes,
        lower_bound_bytes=plan.lower_bound,
        steps=plan.steps,
        boundaries=plan.boundaries,
        buffers=tuple(
            BufferProfile(
                name=buffer.values[0],
                values=buffer.values,
                offset=buffer.offset,
                nbytes=buffer.nbytes,
                first=buffer.first,
                last=buffer.last,
            )
            for buffer in plan.buffers
        ),
    )


def _planned_memory(state: StatePlan, compiled: Iterable[Compiled]) -> tuple[MemoryClass, ...]:
    compiled = tuple(compiled)
    weights = weight_bytes(
        value.weight
        for found in compiled
        for graph in found.graphs
        for value in graph.by_role("weight")
        if value.weight is not None
    )
    kinds = {f"state.{kind}": total for kind, (_, _, total) in state.kinds().items()}
    planned: dict[str, int | None] = {
        **{f"weights.{owner}": nbytes for owner, nbytes in sorted(weights.items())},
        **kinds,
        "state.alignment": state.nbytes - sum(kinds.values()),
        "arena": max(found.plan.arena_bytes for found in compiled),
        "frames": sum(found.inputs.nbytes + found.outputs.nbytes for found in compiled),
        "graphs": None,
    }
    return tuple(MemoryClass(name=name, planned_bytes=size) for name, size in planned.items())


def _actual_memory(rounds: Rounds) -> tuple[MemoryClass, ...]:
    """Plan beside what the tensors of a start-up take. Chunks of prefill are bound when they are
    needed, so frames may be fewer than planned.
    """
    planned = _planned_memory(rounds.state_plan, rounds.compiled.values())
    owners: dict[str, list[Tensor]] = {}
    for use, tensor in rounds.model.weights.items():
        owners.setdefault(use.parts[0].partition("/")[0], []).append(tensor)
    actual: dict[str, Any] = {
        f"weights.{owner}": distinct_bytes(tensors) for owner, tensors in owners.items()
    }
    pools: dict[str, int] = {}
    for pool in rounds.state_plan.pools:
        tensor = rounds.state.tensors[pool.name]
        pools[f"state.{pool.kind}"] = pools.get(f"state.{pool.kind}", 0) + tensor.nbytes
    actual |= pools
    actual["state.alignment"] = rounds.state.storage.nbytes - sum(pools.values())
    actual["arena"] = rounds.arena.nbytes
    actual["frames"] = sum(
        executor.inputs.buffer.nbytes + executor.outputs.buffer.nbytes
        for executor in rounds.executors().values()
    )
    actual["graphs"] = rounds.graph_bytes
    return tuple(
        found.model_copy(update={"actual_bytes": actual.get(found.name)}) for found in planned
    )


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of contiguous tensors, where what several share counts once."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    total = end = 0
    for start, stop in spans:
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
