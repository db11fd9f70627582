"""fuse: gather steps that a tracing lowering compiles as one.

Before: a schedule of single ops. After: maximal runs of traceable ops that stand side by side in
one region (a layer, a head) are one traced step; opaque ops, state changes among them, stay steps
of their own. What no other step reads needs no storage any more. Layers that are alike give steps
that are alike, so each kind is compiled once.
"""

from __future__ import annotations

from itertools import groupby

from dflash_graph.graph import Node
from dflash_graph.passes.schedule import Schedule, Step


def fuse(schedule: Schedule) -> Schedule:
    """The schedule for `inductor`; for other backends the schedule as it is."""
    if schedule.graph.key.backend != "inductor":
        return schedule
    steps: list[Step] = []
    nodes = [node for step in schedule.steps for node in step.nodes]
    for (_, opaque), run in groupby(nodes, key=_fusion_key):
        if opaque:
            steps.extend(Step((node,)) for node in run)
        else:
            steps.append(Step(tuple(run), "traced"))
    return Schedule(schedule.graph, tuple(steps))


def _fusion_key(node: Node) -> tuple[str, bool]:
    return Step((node,)).region, node.contract.opaque
