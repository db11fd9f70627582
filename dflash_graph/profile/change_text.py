"""change_text: a difference and findings as plain text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from dflash_graph.profile.difference import Difference, RoundChange
from dflash_graph.profile.lint import SEVERITIES, Finding
from dflash_graph.profile.text import bytes_text, narrowed
from dflash_graph.report import text_table

#: Lines of a list that a difference prints of each kind.
_LISTED: Final = 20


def difference_text(found: Difference, nodes: int = _LISTED) -> str:
    """A difference, what matters first."""
    blocks = [_rounds_text(found.rounds)]
    if found.identity:
        rows = [(change.field, change.before, change.after) for change in found.identity]
        blocks.append(text_table(("made with", "before", "after"), rows))
    for title, names in (
        ("executors removed", found.executors_removed),
        ("executors added", found.executors_added),
    ):
        if names:
            blocks.append(f"{title}: {', '.join(names)}\n")
    for title, keys in (("nodes removed", found.removed), ("nodes added", found.added)):
        if keys:
            lines = [": ".join((executor, name)) for executor, _, name in keys]
            blocks.append(_listed(title, lines, nodes))
    if found.changed:
        lines = [
            f"{change.executor}: {change.node}: "
            + ", ".join(f"{f.field} {f.before} -> {f.after}" for f in change.fields)
            for change in found.changed
        ]
        blocks.append(_listed("nodes changed", lines, nodes))
    moved = [one for one in found.times if one.before != one.after][:nodes]
    if moved:
        slowest = [
            (
                one.node,
                one.executor,
                f"{one.before:.2f}",
                f"{one.after:.2f}",
                _signed(one.after / one.before - 1) if one.before else "",
            )
            for one in moved
        ]
        blocks.append(
            text_table(("slower or faster", "executor", "before us", "us", "by"), slowest)
        )
    if found.memory:
        sizes = [
            (change.name, bytes_text(change.before), bytes_text(change.after))
            for change in found.memory
        ]
        blocks.append(text_table(("memory", "before", "after"), sizes))
    return "\n".join(blocks)


def findings_text(findings: Sequence[Finding]) -> str:
    """Findings, a line each; those that several executors share are told once."""
    if not findings:
        return "no findings\n"
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for found in findings:
        key = (found.severity, found.rule, found.where, found.message)
        groups.setdefault(key, []).append(found.executor)
    lines = [
        f"{severity}: {rule}: {_executors(names)}: {where}: {message}"
        for (severity, rule, where, message), names in groups.items()
    ]
    counts = Counter(found.severity for found in findings)
    total = ", ".join(
        f"{counts[kind]} {kind}{'' if counts[kind] == 1 else 's'}"
        for kind in SEVERITIES
        if counts[kind]
    )
    return "\n".join((*lines, total)) + "\n"


def _executors(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _rounds_text(rounds: Sequence[RoundChange]) -> str:
    rows = [
        (
            change.executor,
            change.basis,
            f"{change.before:.2f}",
            f"{change.after:.2f}",
            _signed(change.ratio - 1),
            ""
            if change.interval is None
            else f"{_signed(change.interval.low - 1)} .. {_signed(change.interval.high - 1)}",
            f"{change.slower} of {change.nodes}" if change.nodes else "",
            f"{change.sign_p:.3f}" if change.nodes else "",
        )
        for change in rounds
    ]
    head = ("executor", "by", "before us", "after us", "change", "95 % interval")
    return narrowed((*head, "nodes slower", "sign test p"), rows)


def _listed(title: str, lines: Sequence[str], most: int) -> str:
    shown = [f"  {line}" for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"  and {len(lines) - most} more")
    return "\n".join((f"{title}: {len(lines)}", *shown)) + "\n"


def _signed(share: float) -> str:
    return f"{share:+.1%}"
