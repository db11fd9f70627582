"""Choices: what was measured to be best for a node's kernels on one device, node by node.

Profiles that ship lie in `profiles/tuned/`, one JSON file a device. Where none fits, or a node is
not in it, a template's default stands; results are right either way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from dflash_graph.errors import ProfileError
from dflash_graph.op import Sizes

SCHEMA: Final = 1


@dataclass(frozen=True)
class Choice:
    """What tuning may change of one node.

    Args:
        tiles: tile holes.
        num_warps, num_stages: launch parameters.
        pdl: launch as a programmatic dependent (compute capability 9.0 on): the launch begins while
            its predecessor ends, and waits inside before it touches what that one wrote.
    """

    tiles: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2
    pdl: bool = False


@dataclass(frozen=True)
class Entry:
    """One node's measured choice.

    Args:
        op: the op.
        dtype: the model dtype.
        sizes: symbols and attributes that a call must have for the entry to be its.
        tiles, num_warps: as in `Choice`; they order sums, so they hold for any number of rows.
        num_stages: by row tile, see `kernels.registry.row_bucket`.
    """

    op: str
    dtype: str
    sizes: Mapping[str, Any]
    tiles: Mapping[str, int]
    num_warps: int
    num_stages: Mapping[int, int]

    def fits(self, op: str, sizes: Sizes, dtype: str) -> bool:
        return (op, dtype) == (self.op, self.dtype) and all(
            sizes.get(name) == value for name, value in self.sizes.items()
        )


@dataclass(frozen=True)
class Choices:
    """The choices of one device.

    Args:
        device: its name, as the driver gives it.
        capability: its compute capability, 90 for 9.0.
        entries: measured nodes.
        pdl: whether all kernels launch as programmatic dependents.
        source: where they come from, for people.
    """

    device: str
    capability: int
    entries: tuple[Entry, ...] = ()
    pdl: bool = False
    source: str = "default"

    def find(self, op: str, sizes: Sizes, dtype: str, rows: int) -> Choice | None:
        """The choice of a call, or None where none was measured.

        Args:
            rows: the row tile of the call.
        """
        for entry in self.entries:
            if entry.fits(op, sizes, dtype):
                stages = entry.num_stages[min(entry.num_stages, key=lambda r: abs(r - rows))]
                return Choice(entry.tiles, entry.num_warps, stages, self.pdl)
        return None


def parse_choices(text: str, where: str) -> Choices:
    """Read a profile's JSON.

    Raises:
        ProfileError: it is no JSON, of another schema, or lacks a field.
    """
    try:
        document = json.loads(text)
        if document["schema"] != SCHEMA:
            raise ProfileError(f"{where}: expected schema {SCHEMA}, got {document['schema']!r}")
        entries = tuple(
            Entry(
                op=found["op"],
                dtype=found["dtype"],
                sizes=found["sizes"],
                tiles=found["tiles"],
                num_warps=found["num_warps"],
                num_stages={int(rows): count for rows, count in found["num_stages"].items()},
            )
            for found in document["choices"]
        )
        device = document["device"]
        return Choices(device["name"], device["capability"], entries, document["pdl"], where)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProfileError(f"{where}: expected a profile of choices, got {error!r}") from error


@cache
def shipped_choices() -> tuple[Choices, ...]:
    """The profiles that ship, in order of file name."""
    folder = resources.files("dflash_graph.profiles").joinpath("tuned")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return tuple(parse_choices(f.read_text(encoding="utf-8"), f.name) for f in files)


def choices_for(device: str, capability: int) -> Choices:
    """The shipped profile of a device, else one without entries."""
    for found in shipped_choices():
        if (found.device, found.capability) == (device, capability):
            return found
    return Choices(device, capability)
