"""From a declared graph to what a lowering binds: combine, schedule, fuse, workspace."""

from __future__ import annotations

from dataclasses import replace

from dflash_graph.choices import Choices
from dflash_graph.graph import Graph
from dflash_graph.kernels import required_case
from dflash_graph.passes.check import check
from dflash_graph.passes.combine import combine
from dflash_graph.passes.fuse import fuse
from dflash_graph.passes.schedule import Schedule, schedule


def lowered(graph: Graph, choices: Choices | None = None) -> Schedule:
    """The schedule of a graph for its backend; needs no device.

    Args:
        choices: of the device that kernels are for; they decide about workspace too.

    Raises:
        OptionError: the backend is triton and a node has no kernel.
    """
    found = fuse(schedule(check(combine(graph))))
    if graph.key.backend != "triton":
        return found
    nodes = [node for step in found.steps for node in step.nodes]
    workspace = tuple(required_case(found.graph, node, choices).workspace for node in nodes)
    return replace(found, workspace=workspace, choices=choices)
