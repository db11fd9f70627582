"""Choices: what was measured to be best for a node's kernels on one device, node by node.

Profiles that ship lie in `profiles/tuned/`, one JSON file a device; `profile_store` looks further.
Where none fits, or a node is not in it, a template's default stands; results are right either way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from math import isfinite
from reprlib import repr as short
from typing import Any, Final

from dflash_graph.errors import ProfileError
from dflash_graph.op import Sizes

SCHEMA: Final = 1

#: Warps that a kernel may have.
WARPS: Final = (1, 2, 4, 8, 16)


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


#: Tiles of a product that order no sum on tensor cores.
FREE_TILES: Final = frozenset({"BLOCK_O", "BLOCK_I", "HALVES", "TRIGGER", "PREFETCH"})


@dataclass(frozen=True)
class Variation:
    """What one row tile has in the place of what its entry says, where that leaves sums alone.

    A product on tensor cores adds along its inputs in the order of its instruction, in whatever
    tiles of 64 output features and more, and with whatever warps. Other variations are refused.

    Args:
        tiles: tile holes.
        num_warps: None: as the entry says.
    """

    tiles: Mapping[str, int]
    num_warps: int | None = None

    def applied(self, choice: Choice) -> Choice:
        """A choice with this in the place of what it has."""
        warps = self.num_warps or choice.num_warps
        return replace(choice, tiles={**choice.tiles, **self.tiles}, num_warps=warps)


@dataclass(frozen=True)
class Entry:
    """One node's measured choice.

    Args:
        op: the op.
        dtype: the model dtype.
        sizes: symbols and attributes that a call must have for the entry to be its.
        tiles, num_warps: as in `Choice`; they order sums, so they hold for any number of rows.
        num_stages: by row tile, see `kernels.registry.row_bucket`.
        variations: by row tile, what it has of its own.
        pdl: whether this node is launched as a programmatic dependent; None: as the profile says.
        template: hash of the template that was measured; None where it is not known.
        versions: library versions that it was measured with, by name; those not named are not
            known.
        evidence: what was measured, for people.
        source: the file it comes from.
    """

    op: str
    dtype: str
    sizes: Mapping[str, Any]
    tiles: Mapping[str, int]
    num_warps: int
    num_stages: Mapping[int, int]
    variations: Mapping[int, Variation] = field(default_factory=dict)
    pdl: bool | None = None
    template: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    source: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """What it is for; a profile has one entry of a key."""
        sizes = " ".join(f"{name}={value}" for name, value in sorted(self.sizes.items()))
        return f"{self.op} {self.dtype} {sizes}".rstrip()

    def choice(self, rows: int, pdl: bool = False) -> Choice:
        """What a row tile runs with.

        One that was not measured has the stages of the nearest, or as many as the shared memory
        of those holds where its own are larger: a stage of a product is BLOCK_O + rows wide.

        Args:
            rows: the row tile.
            pdl: of the profile, where the entry says nothing.
        """
        nearest = min(self.num_stages, key=lambda measured: abs(measured - rows))
        stages = self.num_stages[nearest]
        common = Choice(self.tiles, self.num_warps, stages, pdl if self.pdl is None else self.pdl)
        found, measured = (
            self.variations[n].applied(common) if n in self.variations else common
            for n in (rows, nearest)
        )
        if rows > nearest and "BLOCK_O" in common.tiles:
            held = stages * (measured.tiles["BLOCK_O"] + nearest)
            fitting = held // (found.tiles["BLOCK_O"] + rows)
            found = replace(found, num_stages=max(1, min(stages, fitting)))
        return found

    def fits(self, op: str, sizes: Sizes, dtype: str) -> bool:
        return (op, dtype) == (self.op, self.dtype) and all(
            sizes.get(name) == value for name, value in self.sizes.items()
        )


#: What an entry and a variation of a document may say, and which evidence is printed as numbers.
_ENTRY: Final = frozenset(one.name for one in fields(Entry)) - {"source"}
_VARIATION: Final = frozenset(one.name for one in fields(Variation))
_MEASURED: Final = frozenset({"winner_us", "incumbent_us", "margin", "noise"})


@dataclass(frozen=True)
class Choices:
    """The choices of one device.

    Args:
        device: its name, as the driver gives it.
        capability: its compute capability, 90 for 9.0.
        entries: measured nodes; the first that fits a call is its.
        pdl: whether all kernels launch as programmatic dependents.
        source: where they come from, for people.
    """

    device: str
    capability: int
    entries: tuple[Entry, ...] = ()
    pdl: bool = False
    source: str = "default"

    def entry(self, op: str, sizes: Sizes, dtype: str) -> Entry | None:
        """The entry of a call, or None where none was measured."""
        return next((e for e in self.entries if e.fits(op, sizes, dtype)), None)

    def find(self, op: str, sizes: Sizes, dtype: str, rows: int) -> Choice | None:
        """The choice of a call, or None where none was measured.

        Args:
            rows: the row tile of the call.
        """
        entry = self.entry(op, sizes, dtype)
        if entry is None:
            return None
        return entry.choice(rows, self.pdl)


def parse_choices(text: str, where: str) -> Choices:
    """Read a profile's JSON.

    Raises:
        ProfileError: it is no JSON, of another schema, lacks a field, or one is out of range.
    """
    try:
        document = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if document["schema"] != SCHEMA:
            raise ProfileError(f"{where}: expected schema {SCHEMA}, got {document['schema']!r}")
        versions = dict(document.get("versions") or {})
        entries = tuple(_parse_entry(found, versions, where) for found in document["choices"])
        device, pdl = document["device"], document["pdl"]
        name, capability = device["name"], device["capability"]
        _require(type(name) is str, f"{where}: device.name", "a text", name)
        _require(_is_count(capability, 1), f"{where}: device.capability", "such as 90", capability)
        _require(type(pdl) is bool, f"{where}: pdl", "true or false", pdl)
        return Choices(name, capability, entries, pdl, where)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{where}: expected a profile of choices, got {error!r}") from error


def _parse_entry(found: Mapping[str, Any], versions: Mapping[str, str], where: str) -> Entry:
    op = found["op"]
    _require(type(op) is str, f"{where}: op", "a text", op)
    entry = f"{where}: {op}"
    _require_fields(found, _ENTRY, entry)
    _require(type(found["dtype"]) is str, f"{entry}: dtype", "a text", found["dtype"])
    for name in ("sizes", "versions", "evidence"):
        given = found.get(name, {})
        _require(isinstance(given, dict), f"{entry}: {name}", "an object", given)
    _require_tiles(found["tiles"], f"{entry}: tiles")
    _require_warps(found["num_warps"], f"{entry}: num_warps")
    stages = {int(rows): count for rows, count in found["num_stages"].items()}
    if not stages:
        raise ValueError("num_stages is empty")
    for rows, count in stages.items():
        _require(rows > 0, f"{entry}: num_stages", "row tiles of 1 and more", rows)
        _require(_is_count(count, 1), f"{entry}: num_stages.{rows}", "1 or more", count)
    pdl, template = found.get("pdl"), found.get("template")
    _require(pdl is None or type(pdl) is bool, f"{entry}: pdl", "true or false", pdl)
    _require(template is None or type(template) is str, f"{entry}: template", "a hash", template)
    for name, value in found.get("versions", versions).items():
        _require(type(value) is str, f"{entry}: versions.{name}", "a text", value)
    for name in sorted(_MEASURED & found.get("evidence", {}).keys()):
        value = found["evidence"][name]
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        _require(is_number, f"{entry}: evidence.{name}", "a number", value)
    return Entry(
        op=found["op"],
        dtype=found["dtype"],
        sizes=dict(found["sizes"]),
        tiles=dict(found["tiles"]),
        num_warps=found["num_warps"],
        num_stages=stages,
        variations=_parse_variations(found, entry, where),
        pdl=found.get("pdl"),
        template=found.get("template"),
        versions=dict(found.get("versions", versions)),
        evidence=dict(found.get("evidence", {})),
        source=where,
    )


def _parse_variations(found: Mapping[str, Any], entry: str, where: str) -> dict[int, Variation]:
    variations: dict[int, Variation] = {}
    for rows, own in found.get("variations", {}).items():
        place = f"{entry}: variations.{rows}"
        variation = Variation(dict(own["tiles"]), own.get("num_warps"))
        _require(int(rows) > 0, place, "row tiles of 1 and more", rows)
        _require_fields(own, _VARIATION, place)
        _require_tiles(own["tiles"], f"{place}.tiles")
        if variation.num_warps is not None:
            _require_warps(variation.num_warps, f"{place}.num_warps")
        variations[int(rows)] = variation
    for rows, own in variations.items():
        if not _leaves_sums_alone(own, found["tiles"], found["dtype"]):
            raise ProfileError(
                f"{where}: {found['op']}: row tile {rows}: expected variations of "
                f"{', '.join(sorted(FREE_TILES))} of a bfloat16 product with tiles of 64 output "
                f"features and more, got {dict(own.tiles)} beside {dict(found['tiles'])} in "
                f"{found['dtype']}"
            )
    return variations


def _finite(text: str) -> float:
    """A number of a document; what is none could not be written again."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _require(is_met: bool, where: str, expected: str, found: object) -> None:
    if not is_met:
        raise ProfileError(f"{where}: expected {expected}, got {short(found)}")


def _require_fields(found: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(found.keys() - known)
    if unknown:
        raise ProfileError(
            f"{where}: expected fields of {', '.join(sorted(known))}, got {', '.join(unknown)}"
        )


def _require_tiles(tiles: object, where: str) -> None:
    if not isinstance(tiles, dict):
        raise ProfileError(f"{where}: expected an object, got {short(tiles)}")
    for name, value in tiles.items():
        _require(_is_count(value, 0), f"{where}.{name}", "0 or more", value)


def _require_warps(count: object, where: str) -> None:
    is_met = type(count) is int and count in WARPS
    _require(is_met, where, f"one of {', '.join(map(str, WARPS))}", count)


def may_vary(tiles: Mapping[str, int], dtype: str) -> bool:
    """Whether `FREE_TILES` of these leave sums alone: a product on tensor cores, in tiles of 64
    output features and more.
    """
    return dtype == "bfloat16" and tiles.get("BLOCK_O", 0) // (1 + tiles.get("HALVES", 0)) >= 64


def _leaves_sums_alone(own: Variation, tiles: Mapping[str, int], dtype: str) -> bool:
    """Whether a row tile with tiles of its own has the bits of the others, see `Variation`."""
    both = (tiles, {**tiles, **own.tiles})
    return own.tiles.keys() <= FREE_TILES and all(may_vary(found, dtype) for found in both)


def entry_document(entry: Entry) -> dict[str, Any]:
    """An entry as `parse_choices` reads it; what is not known is left out."""
    document: dict[str, Any] = {
        "op": entry.op,
        "dtype": entry.dtype,
        "sizes": dict(entry.sizes),
        "tiles": dict(entry.tiles),
        "num_warps": entry.num_warps,
        "num_stages": {str(rows): count for rows, count in sorted(entry.num_stages.items())},
    }
    if entry.variations:
        document["variations"] = variations_document(entry.variations)
    if entry.pdl is not None:
        document["pdl"] = entry.pdl
    if entry.template is not None:
        document["template"] = entry.template
    if entry.versions:
        document["versions"] = dict(sorted(entry.versions.items()))
    if entry.evidence:
        document["evidence"] = dict(entry.evidence)
    return document


def variations_document(variations: Mapping[int, Variation]) -> dict[str, Any]:
    """Variations as `parse_choices` reads them."""
    return {
        str(rows): {"tiles": dict(own.tiles)}
        | ({} if own.num_warps is None else {"num_warps": own.num_warps})
        for rows, own in sorted(variations.items())
    }


def choices_document(choices: Choices) -> dict[str, Any]:
    """A profile as `parse_choices` reads it."""
    return {
        "schema": SCHEMA,
        "device": {"name": choices.device, "capability": choices.capability},
        "pdl": choices.pdl,
        "choices": [entry_document(entry) for entry in choices.entries],
    }


def layered(device: str, capability: int, layers: Iterable[Choices]) -> Choices:
    """Several profiles of one device as one: of two entries for a call, the earlier layer's.

    What a profile says of all kernels holds for its own entries; for nodes without one, the first
    layer's word does.
    """
    layers = tuple(layers)
    if not layers:
        return Choices(device, capability)
    entries = tuple(
        replace(entry, pdl=layer.pdl if entry.pdl is None else entry.pdl)
        for layer in layers
        for entry in layer.entries
    )
    source = ", ".join(layer.source for layer in layers)
    return Choices(device, capability, entries, layers[0].pdl, source)


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
