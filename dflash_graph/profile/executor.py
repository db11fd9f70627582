"""executor: an executor of a profile: its segments, their nodes, and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dflash_graph.choices import Choices
from dflash_graph.executors import Compiled, Lowering
from dflash_graph.graph import Graph, Node
from dflash_graph.kernels import KernelCase, node_case
from dflash_graph.op import Cost, Sizes
from dflash_graph.passes.schedule import Schedule, Step
from dflash_graph.planner import Plan
from dflash_graph.profile.floors import bound_of, floor_us
from dflash_graph.profile.measured import ExecutorTimes
from dflash_graph.profile.parts import (
    BufferProfile,
    Ceiling,
    Config,
    ExecutorProfile,
    Implementation,
    KernelResources,
    NodeProfile,
    PlanProfile,
    Samples,
    SegmentProfile,
    ValueFacts,
)

#: Compiles one case: what its kernels take.
Resources = Callable[[KernelCase], tuple[KernelResources, ...]]


@dataclass(frozen=True)
class Setting:
    """What all executors of a profile have in common.

    Args:
        context: tokens before the block that costs are for.
        ceiling: what floors stand on.
        choices: of the device that kernels are for.
        capacities: capacity name -> number.
        resources: compiles kernels.
    """

    context: int
    ceiling: Ceiling
    choices: Choices | None
    capacities: Mapping[str, int]
    resources: Resources | None = None


def lowering_of(compiled: Compiled) -> Lowering:
    """How an executor's segments run, but for prefill on a device."""
    return compiled.graphs[0].key.backend


def executor_profile(
    name: str,
    compiled: Compiled,
    setting: Setting,
    lowering: Lowering,
    times: ExecutorTimes | None = None,
) -> ExecutorProfile:
    """An executor as its plan, its choices and, where it was timed, its times describe it.

    Args:
        name: of the executor.
        compiled: its schedules, plan and frames.
        setting: what it has in common with the others.
        lowering: how its segments run.
        times: where they were taken.
    """
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
    setting: Setting,
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
    setting: Setting,
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
