"""What stores hold, as JSON-ready values and as text: entries, coverage of a geometry, changes.

Text is in short lines, so that it survives a narrow terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_graph.autotune.decision import Decision
from dflash_graph.autotune.journal import Journal
from dflash_graph.autotune.tasks import Task
from dflash_graph.choices import Choices, Entry, entry_document, layered
from dflash_graph.errors import OptionError
from dflash_graph.profile_store import (
    Identity,
    Layer,
    all_layers,
    device_identity,
    differences,
    find_layers,
    lookup,
    running_versions,
    user_folder,
)


def identity_for(device: str | None) -> Identity:
    """A device by name, or the one that is here, or the only one that there are profiles of.

    Raises:
        OptionError: none is meant, or several.
    """
    known = {(c.device, c.capability) for layer in all_layers() if (c := layer.choices)}
    names = ", ".join(sorted(repr(name) for name, _ in known)) or "none"
    if device is None:
        try:
            return device_identity()
        except OptionError:
            meant = known
    else:
        meant = {pair for pair in known if pair[0].lower() == device.lower()}
    if len(meant) != 1:
        raise OptionError(
            f"device: expected one that there are profiles of ({names}), got {device!r}"
        )
    ((name, capability),) = meant
    return Identity(name, capability, running_versions())


def entry_report(entry: Entry, identity: Identity) -> dict[str, Any]:
    """An entry, whether it is used, and in what it differs from what runs here."""
    found = differences(entry, identity)
    return {
        **entry_document(entry),
        "source": entry.source,
        "used": not any(difference.excludes for difference in found),
        "template_known": entry.template is not None,
        "differs": [
            {
                "field": difference.field,
                "stored": str(difference.stored),
                "here": str(difference.here),
                "excludes": difference.excludes,
            }
            for difference in found
        ],
    }


def layer_report(layer: Layer) -> dict[str, Any]:
    """A file: what it is of and what is in it."""
    choices = layer.choices
    report: dict[str, Any] = {"layer": layer.name, "source": layer.source}
    if choices is None:
        return {**report, "problem": layer.problem or "missing"}
    identity = Identity(choices.device, choices.capability, running_versions())
    return {
        **report,
        "device": choices.device,
        "capability": choices.capability,
        "pdl": choices.pdl,
        "entries": [entry_report(entry, identity) for entry in choices.entries],
    }


def show_text(reports: Iterable[Mapping[str, Any]]) -> str:
    """Files and their entries."""
    lines: list[str] = []
    for report in reports:
        lines.append(f"{report['layer']}: {report['source']}")
        if "problem" in report:
            lines += [f"  not read: {report['problem']}", ""]
            continue
        pdl = ", programmatic dependent launches" if report["pdl"] else ""
        lines.append(f"  {report['device']}, sm_{report['capability']}{pdl}")
        for entry in report["entries"]:
            lines += [f"  {line}" for line in _entry_lines(entry)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n" if lines else "no profiles\n"


def _entry_lines(entry: Mapping[str, Any]) -> list[str]:
    stages = " ".join(f"{rows}:{count}" for rows, count in entry["num_stages"].items())
    launch = f"warps {entry['num_warps']}, stages by row tile {stages}"
    if "pdl" in entry:
        launch += ", pdl" if entry["pdl"] else ", no pdl"
    lines = [
        _title(entry),
        f"  {_pairs(entry['tiles'])}",
        f"  {launch}",
    ]
    for rows, own in entry.get("variations", {}).items():
        warps = f", warps {own['num_warps']}" if "num_warps" in own else ""
        lines.append(f"  row tile {rows}: {_pairs(own['tiles'])}{warps}")
    evidence = entry.get("evidence", {})
    if {"winner_us", "incumbent_us", "margin", "noise"} <= evidence.keys():
        lines.append(
            f"  {evidence['winner_us']:.1f} us, before {evidence['incumbent_us']:.1f}; margin "
            f"{evidence['margin']:.1%}, noise {evidence['noise']:.1%}"
        )
    known = "" if entry["template_known"] else "; which template was measured is unknown"
    lines.append(f"  {'used' if entry['used'] else 'not used'}{known}")
    lines += [
        f"  {d['field']}: measured with {d['stored']}, here {d['here']}" for d in entry["differs"]
    ]
    return lines


def _title(entry: Mapping[str, Any]) -> str:
    return f"{entry['op']} {entry['dtype']} {_pairs(entry['sizes'])}".rstrip()


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def status_report(journals: Sequence[Path]) -> dict[str, Any]:
    """Where profiles are looked for, what is there, and what journals hold."""
    try:
        here: Mapping[str, Any] | None = vars(device_identity())
    except OptionError:
        here = None
    return {
        "folder": str(user_folder()),
        "device": dict(here) if here else None,
        "versions": running_versions(),
        "profiles": [_count(layer) for layer in all_layers()],
        "journals": [{"path": str(path), "measurements": len(Journal(path))} for path in journals],
    }


def _count(layer: Layer) -> dict[str, Any]:
    report = layer_report(layer)
    entries = report.pop("entries", [])
    return {
        **report,
        "entries": len(entries),
        "used": sum(entry["used"] for entry in entries),
    }


def status_text(report: Mapping[str, Any]) -> str:
    """A status for people."""
    device = report["device"]
    lines = [
        f"folder  {report['folder']}",
        f"device  {device['device'] if device else 'none that torch sees'}",
    ]
    for found in report["profiles"]:
        lines += ["", f"{found['layer']}: {found['source']}"]
        if "problem" in found:
            lines.append(f"  not read: {found['problem']}")
        else:
            lines.append(f"  {found['device']}, sm_{found['capability']}")
            lines.append(f"  {found['entries']} entries, {found['used']} used")
    for found in report["journals"]:
        lines += ["", f"journal: {found['path']}", f"  {found['measurements']} measurements"]
    return "\n".join(lines) + "\n"


def coverage(tasks: Sequence[Task], identity: Identity, explicit: Path | None) -> dict[str, Any]:
    """Which entry each task of a geometry runs with on a device."""
    choices = lookup(identity, explicit)
    rows = []
    for task in tasks:
        for part in task.parts:
            call = part.calls[0]
            entry = choices.entry(call.op, call.sizes, call.dtype)
            rows.append(
                {
                    "op": part.op,
                    "sizes": dict(part.key),
                    "dtype": task.dtype,
                    "row_tiles": [call.rows for call in part.calls],
                    "launches": max(call.launches for call in part.calls),
                    "source": entry.source if entry else "default",
                    "choice": str(task.incumbent(choices)),
                }
            )
    layers = find_layers(identity.device, identity.capability, explicit)
    return {
        "device": identity.device,
        "capability": identity.capability,
        "looked_up": [layer.source for layer in layers if layer.choices],
        "tasks": rows,
    }


def launches_text(count: int) -> str:
    """``"3 launches a round"``."""
    return f"{count} launch{'' if count == 1 else 'es'} a round"


def coverage_text(report: Mapping[str, Any]) -> str:
    """Coverage for people."""
    lines = [f"{report['device']}, sm_{report['capability']}"]
    for row in report["tasks"]:
        tiles = " ".join(map(str, row["row_tiles"]))
        lines += [
            "",
            f"{_title(row)}",
            f"  {launches_text(row['launches'])}, row tiles {tiles}",
            f"  {row['choice']}",
            f"  from {row['source']}",
        ]
    return "\n".join(lines) + "\n"


def changes(old: Choices, new: Choices) -> dict[str, Any]:
    """What differs between two profiles, entry by entry."""
    before, after = (_by_key(choices) for choices in (old, new))
    changed = []
    for key in (key for key in before if key in after):
        left, right = entry_document(before[key]), entry_document(after[key])
        fields = {
            name: [left.get(name), right.get(name)]
            for name in dict.fromkeys((*left, *right))
            if left.get(name) != right.get(name)
        }
        if fields:
            changed.append({"entry": key, "fields": fields})
    profile = {
        name: [getattr(old, name), getattr(new, name)]
        for name in ("device", "capability", "pdl")
        if getattr(old, name) != getattr(new, name)
    }
    return {
        "old": old.source,
        "new": new.source,
        "profile": profile,
        "added": [entry_document(entry) for key, entry in after.items() if key not in before],
        "removed": [entry_document(entry) for key, entry in before.items() if key not in after],
        "changed": changed,
    }


def _by_key(choices: Choices) -> dict[str, Entry]:
    """Entries that say themselves what their profile says of all."""
    own = layered(choices.device, choices.capability, [choices])
    return {entry.key: entry for entry in own.entries}


def merge_report(before: Choices | None, given: Sequence[Choices]) -> tuple[list[Entry], Any]:
    """The entries of several profiles, of one key the last one's, and what they do to another."""
    held = _by_key(before) if before else {}
    new: dict[str, Entry] = {}
    for choices in given:
        new |= _by_key(choices)
    return list(new.values()), {
        "added": sorted(key for key in new if key not in held),
        "replaced": sorted(key for key in new if key in held and held[key] != new[key]),
    }


def changes_text(report: Mapping[str, Any]) -> str:
    """Changes for people."""
    lines = [f"{name}: {old} -> {new}" for name, (old, new) in report["profile"].items()]
    lines += [f"+ {_title(entry)}" for entry in report["added"]]
    lines += [f"- {_title(entry)}" for entry in report["removed"]]
    for change in report["changed"]:
        lines.append(f"~ {change['entry']}")
        for name, (old, new) in change["fields"].items():
            lines += [f"    {part}" for part in _field_lines(name, old, new)]
    return "\n".join(lines) + "\n" if lines else "no difference\n"


def _field_lines(name: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            f"{name}.{key}: {old.get(key)} -> {new.get(key)}"
            for key in dict.fromkeys((*old, *new))
            if old.get(key) != new.get(key)
        ]
    return [f"{name}: {old} -> {new}"]


def decisions_text(decisions: Sequence[Decision]) -> str:
    """What a run came to, for people."""
    lines: list[str] = []
    for decision in decisions:
        winner, second, incumbent = decision.microseconds
        lines.append(f"{decision.task.name}: {decision.result}")
        if decision.message:
            lines.append(f"  {decision.message}")
        lines.append(f"  {decision.tried} candidates tried, {decision.failed} failed or wrong")
        if decision.winner is not None:
            lines.append(f"  fastest    {winner:.1f} us  {decision.winner}")
            if decision.runner_up is not None:
                lines.append(f"  runner-up  {second:.1f} us  {decision.runner_up}")
            if incumbent:
                lines.append(f"  before     {incumbent:.1f} us  {decision.incumbent}")
            lines.append(
                f"  margin {decision.margin:.2%}, noise {decision.noise:.2%}, "
                f"{decision.turns} turns"
            )
        lines.append("")
    return "\n".join(lines[:-1]) + "\n" if lines else "no tasks\n"
