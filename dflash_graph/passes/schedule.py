"""schedule: a total order of steps.

Before: a checked graph. After: every node stands in exactly one step, after all steps it depends
on; equal graphs give equal schedules because ties go to program order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import networkx as nx

from dflash_graph.choices import Choices
from dflash_graph.graph import EXTERNAL, Graph, Node


@dataclass(frozen=True)
class Step:
    """Nodes that run as one: a single op call, or several that a lowering traces together."""

    nodes: tuple[Node, ...]
    kind: Literal["op", "traced"] = "op"

    @property
    def name(self) -> str:
        first, last = self.nodes[0].name, self.nodes[-1].name
        return first if first == last else f"{first} .. {last}"

    @property
    def region(self) -> str:
        """The first two parts of the region: where a step belongs in the model."""
        return "/".join(self.nodes[0].region.split("/")[:2])


@dataclass(frozen=True)
class Schedule:
    """Steps of one segment, in order.

    Args:
        graph: what they run.
        steps: all of its nodes.
        workspace: bytes of scratch of each step, besides its values; empty where none needs any.
        choices: what kernels were chosen by; None: templates' defaults.
    """

    graph: Graph
    steps: tuple[Step, ...]
    workspace: tuple[int, ...] = ()
    choices: Choices | None = None

    @cached_property
    def _readers(self) -> dict[str, list[int]]:
        readers: dict[str, list[int]] = {}
        for index, step in enumerate(self.steps):
            for node in step.nodes:
                for _, name in node.operands():
                    seen = readers.setdefault(name, [])
                    if not seen or seen[-1] != index:
                        seen.append(index)
        return readers

    def readers(self, value: str) -> list[int]:
        """Indices of the steps that read a value, ascending."""
        return self._readers.get(value, [])

    def inputs(self, index: int) -> tuple[str, ...]:
        """Values a step takes from outside, in order of first use."""
        step = self.steps[index]
        inside = {name for node in step.nodes for name in node.outputs.values()}
        found: dict[str, None] = {}
        for node in step.nodes:
            for _, name in node.operands():
                if name not in inside:
                    found.setdefault(name)
        return tuple(found)

    def escapes(self, index: int) -> tuple[str, ...]:
        """Values a step must store: another step reads them, or they are retained or output.

        A single op stores all its outputs, read or not.
        """
        step = self.steps[index]
        return tuple(
            name
            for node in step.nodes
            for name in node.outputs.values()
            if step.kind == "op"
            or self.graph.values[name].role in ("retained", "output")
            or any(reader != index for reader in self.readers(name))
        )

    def workspace_name(self, index: int) -> str:
        """Name of a step's workspace among what a plan places."""
        return f"{self.steps[index].name} (workspace)"

    def stored(self) -> tuple[tuple[int, str], ...]:
        """(step index, value) of every value that is stored in the arena or the result frame."""
        return tuple(
            (index, name)
            for index in range(len(self.steps))
            for name in self.escapes(index)
            if self.graph.values[name].role not in EXTERNAL
        )


def schedule(graph: Graph) -> Schedule:
    """One step per node, in the topological order that is nearest to program order."""
    order = nx.lexicographical_topological_sort(
        graph.digraph, key=lambda name: graph.digraph.nodes[name]["index"]
    )
    return Schedule(graph, tuple(Step((graph.node(name),)) for name in order))
