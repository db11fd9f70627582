"""From a declared graph to what a lowering binds: combine, schedule, fuse, workspace."""

from __future__ import annotations

from dataclasses import replace

from dflash_graph.choices import Choices
from dflash_graph.graph import Graph
from dflash_graph.kernels import node_case
from dflash_graph.passes.check import check
from dflash_graph.passes.combine import combine
from dflash_graph.passes.fuse import fuse
from dflash_graph.passes.schedule import Schedule, schedule


def lowered(graph: Graph, choices: Choices | None = None) -> Schedule:
    """The schedule of a graph for its backend; needs no device.

    Args:
        choices: of the device that kernels are for; they decide about workspace too.
    """
    found = fuse(schedule(check(combine(graph))))
    if graph.key.backend != "triton":
        return found
    cases = [node_case(found.graph, node, choices) for step in found.steps for node in step.nodes]
    workspace = tuple(case.workspace if case else 0 for case in cases)
    return replace(found, workspace=workspace, choices=choices)
