"""regions: the nodes of an executor as the tree that their regions make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

from dflash_graph.profile.parts import ExecutorProfile, NodeProfile

#: Styles of top regions on the page: `c0` to `c6`, and `c7` for all that come after.
STYLES: Final = 7

#: So many numbered siblings become one.
_MANY: Final = 4
_NUMBERED: Final = re.compile(r"(.*)\.\d+")


@dataclass(frozen=True)
class Region:
    """A part of the tree.

    Args:
        name: last part of its path, or `layer.0 to layer.63` for siblings that differ by number.
        nodes: its own, in running order.
        children: regions below it, in order of their first node.
    """

    name: str
    nodes: tuple[NodeProfile, ...]
    children: tuple[Region, ...]

    @cached_property
    def every_node(self) -> tuple[NodeProfile, ...]:
        """Its own nodes and those below it."""
        return (*self.nodes, *(node for child in self.children for node in child.every_node))

    @property
    def floor_us(self) -> float:
        return sum(node.floor_us for node in self.every_node)

    @property
    def us(self) -> float:
        """What its nodes took, with the floor of those that were not timed."""
        return sum(map(node_us, self.every_node))

    @property
    def timed(self) -> int:
        """How many of its nodes were timed."""
        return sum(node.time_us is not None for node in self.every_node)


def node_us(node: NodeProfile) -> float:
    """What a node took, else its floor, in microseconds."""
    return node.floor_us if node.time_us is None else node.time_us


def parts(region: str) -> tuple[str, ...]:
    """The parts of a region's path."""
    return tuple(part for part in region.split("/") if part)


def top_region(region: str, depth: int = 1) -> str:
    """The first parts of a region's path."""
    return "/".join(parts(region)[:depth]) or "(no region)"


def styles_of(executors: Iterable[ExecutorProfile]) -> dict[str, str]:
    """A style for each top region, the same in every executor."""
    found: dict[str, str] = {}
    for executor in executors:
        for node in executor.nodes():
            found.setdefault(top_region(node.region), f"c{min(len(found), STYLES)}")
    return found


def tree(nodes: Iterable[NodeProfile]) -> tuple[Region, ...]:
    """The top regions of some nodes; those without a region stand in one of their own."""
    placed = [(parts(node.region) or (top_region(""),), node) for node in nodes]
    return _level(placed, 0)


def _level(placed: Sequence[tuple[tuple[str, ...], NodeProfile]], depth: int) -> tuple[Region, ...]:
    members: dict[str, list[tuple[tuple[str, ...], NodeProfile]]] = {}
    for path, node in placed:
        members.setdefault(path[depth], []).append((path, node))
    regions = [
        Region(
            name,
            tuple(node for path, node in found if len(path) == depth + 1),
            _level([item for item in found if len(item[0]) > depth + 1], depth + 1),
        )
        for name, found in members.items()
    ]
    return tuple(_folded(regions))


def _folded(regions: Iterable[Region]) -> Iterator[Region]:
    """Runs of many numbered siblings as one region each."""

    def stem(region: Region) -> str | None:
        found = _NUMBERED.fullmatch(region.name)
        return None if found is None else found[1]

    for name, run in groupby(regions, key=stem):
        alike = tuple(run)
        if name is not None and len(alike) >= _MANY:
            yield Region(f"{alike[0].name} to {alike[-1].name}", (), alike)
        else:
            yield from alike
