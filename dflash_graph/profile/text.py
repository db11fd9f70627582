"""text: a profile and its acceptance as plain tables for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from dflash_graph.errors import ProfileError
from dflash_graph.profile.acceptance import BestK, histogram, survival, tokens_per_round
from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import (
    AcceptanceCounts,
    ExecutorProfile,
    NodeProfile,
    SegmentProfile,
)
from dflash_graph.profile.sampling_statistics import Interval
from dflash_graph.report import size_text, text_table

_NUMBER: Final = re.compile(r"\.\d+(?=/|$)")
_BAR: Final = 24


def head_text(profile: Profile) -> str:
    """What a profile is of, on a few lines."""
    identity, ceiling = profile.identity, profile.ceiling
    device = identity.device
    capability = "" if device.capability is None else f", capability {device.capability / 10:.1f}"
    versions = ", ".join(f"{name} {found}" for name, found in identity.versions.items())
    options = ", ".join(
        f"{name} {value}" for name, value in identity.options.items() if value is not None
    )
    flops = "" if ceiling.tflop_per_s is None else f", {ceiling.tflop_per_s:g} TFLOP/s"
    return (
        f"{identity.name}, made {identity.created}\n"
        f"device {device.name}{capability}; choices: {identity.choices}\n"
        f"{versions}\n"
        f"{options}\n"
        f"geometry {identity.geometry_hash}; ceiling {ceiling.read_tb_per_s:.3g} TB/s{flops} "
        f"({ceiling.source})\n"
    )


def executors_text(profile: Profile) -> str:
    """All executors, a line each."""
    rows = [
        (
            executor.name,
            str(sum(1 for _ in executor.nodes())),
            f"{executor.floor_us:.1f}",
            _optional(None if executor.measured is None else executor.measured.median),
            _optional(None if executor.measured is None else executor.measured.spread),
            _optional(executor.unattributed_us),
            size_text(executor.plan.arena_bytes),
            "" if executor.replays is None else str(executor.replays),
            "" if executor.capture_seconds is None else f"{executor.capture_seconds:.2f}",
            "" if executor.graph_bytes is None else size_text(executor.graph_bytes),
        )
        for executor in profile.executors
    ]
    head = ("executor", "nodes", "floor us", "round us", "+-", "unattributed", "arena")
    return narrowed((*head, "runs", "capture s", "graphs"), rows)


def executor_text(executor: ExecutorProfile, by: str) -> str:
    """The totals of an executor and a table of its parts.

    Args:
        by: `region`, `op` or `node`.
    """
    items = list(_groups(executor, by).items())
    if by != "region":
        items.sort(key=lambda item: -sum(map(executor.fraction, item[1])))
    rows = [_part(name, nodes, executor) for name, nodes in items]
    head = ("nodes", "floor us", "measured us", "of round", "of floor", "read", "written", "GFLOP")
    table = narrowed((by, *head, "bound", "runs by"), rows)
    return f"{_totals(executor)}\n{table}"


def parts(executor: ExecutorProfile, by: str) -> list[dict[str, Any]]:
    """The rows of `executor_text` as JSON-ready values."""
    found = []
    for name, nodes in _groups(executor, by).items():
        times = [node.time_us for node in nodes if node.time_us is not None]
        found.append(
            {
                by: name,
                "nodes": len(nodes),
                "floor_us": sum(node.floor_us for node in nodes),
                "measured_us": sum(times) if times else None,
                "of_round": sum(map(executor.fraction, nodes)),
                "read_bytes": sum(node.read_bytes for node in nodes),
                "write_bytes": sum(node.write_bytes for node in nodes),
                "flops": sum(node.flops for node in nodes),
                "bounds": dict(Counter(node.bound for node in nodes)),
                "implementations": dict(Counter(node.implementation for node in nodes)),
                "sources": dict(Counter(node.source for node in nodes)),
            }
        )
    return found


def node_text(executor: ExecutorProfile, name: str) -> str:
    """Everything about one node.

    Raises:
        ProfileError: the executor has no such node.
    """
    segment, node = find_node(executor, name)
    facts = {
        "executor": f"{executor.name}, segment {segment.name}, step {node.step}",
        "region": node.region,
        "op": node.op,
        "runs by": f"{node.implementation}{', a part of a compiled step' if node.traced else ''}",
        "template": "" if node.config is None else node.config.template,
        "config": "" if node.config is None else node.config.text,
        "choice": node.source,
        "reads": f"{size_text(node.read_bytes)} ({node.read_bytes} B)",
        "writes": f"{size_text(node.write_bytes)} ({node.write_bytes} B)",
        "flops": str(node.flops),
        "floor": f"{node.floor_us:.3f} us, bound by {node.bound}",
        "measured": ""
        if node.measured is None
        else f"{node.measured.median:.3f} us +- {node.measured.spread:.3f} "
        f"({len(node.measured.values)} times)",
        "of the round": f"{executor.fraction(node):.2%}",
    }
    lines = [node.name, *(f"  {field:<12}  {value}" for field, value in facts.items() if value)]
    for kernel in node.resources:
        lines.append(
            f"  kernel        {kernel.kernel}: {kernel.registers} registers, "
            f"{kernel.shared_bytes} B shared, {kernel.spill_bytes} B spilled"
        )
    lines += [f"  input         {source}" for source in node.inputs]
    lines += [f"  weight        {weight}" for weight in node.weights]
    for value in node.outputs:
        shape = " ".join(map(str, value.shape))
        lines.append(f"  output        {value.name} [{shape}] {value.dtype}, {value.role}")
    return "\n".join(lines) + "\n"


def find_node(executor: ExecutorProfile, name: str) -> tuple[SegmentProfile, NodeProfile]:
    """A node of an executor with its segment.

    Raises:
        ProfileError: there is none; the message says what comes near.
    """
    for segment in executor.segments:
        for node in segment.nodes:
            if node.name == name:
                return segment, node
    part = name.rpartition("/")[2]
    near = [node.name for node in executor.nodes() if part and part in node.name][:4]
    hint = f"; there is {', '.join(near)}" if near else ""
    raise ProfileError(f"node: expected a node of {executor.name!r}, got {name!r}{hint}")


def memory_text(profile: Profile) -> str:
    """Memory by class, plan beside actual."""
    rows = [
        (
            found.name,
            bytes_text(found.planned_bytes),
            bytes_text(found.actual_bytes),
            "" if found.planned_bytes is None else str(found.planned_bytes),
        )
        for found in profile.memory
        if found.planned_bytes or found.actual_bytes
    ]
    planned = sum(found.planned_bytes or 0 for found in profile.memory)
    known = [found.actual_bytes for found in profile.memory if found.actual_bytes is not None]
    rows.append(("total", size_text(planned), size_text(sum(known)) if known else "", str(planned)))
    return narrowed(("memory", "planned", "actual", "planned bytes"), rows)


def startup_text(profile: Profile) -> str:
    """Stages of the start-up; empty where nothing was started."""
    if not profile.startup:
        return ""
    rows = [(stage.name, f"{stage.seconds:.3f}") for stage in profile.startup]
    rows.append(("total", f"{sum(stage.seconds for stage in profile.startup):.3f}"))
    return text_table(("start-up", "seconds"), rows)


def acceptance_text(counts: AcceptanceCounts, best: BestK | None = None) -> str:
    """Histogram, survival and, where costs were given, the expected best K."""
    exact = histogram(counts)
    most = max(exact, default=0)
    lines = [
        f"{counts.rounds} rounds, {counts.drafted} drafts verified, "
        f"{sum(counts.accepted_by_position)} accepted; "
        f"{tokens_per_round(counts):.3f} tokens a round"
        + ("" if counts.ms_per_round is None else f", {counts.ms_per_round:.3f} ms a round"),
        "",
        "accepted  rounds",
    ]
    for accepted, rounds in enumerate(exact):
        bar = "#" * -(-_BAR * rounds // most) if most else ""
        lines.append(f"{accepted:>8}  {rounds:>6}  {bar}".rstrip())
    rows = [
        (
            str(found.position),
            str(found.verified),
            str(found.accepted),
            f"{found.share:.3f}",
            _interval(found.interval, ".3f"),
        )
        for found in survival(counts)
    ]
    if rows:
        head = ("position", "verified", "accepted", "survival", "95 % interval")
        lines += ["", text_table(head, rows).rstrip("\n")]
    if best is not None:
        lines += ["", best_text(best).rstrip("\n")]
    return "\n".join(lines) + "\n"


def best_text(best: BestK) -> str:
    """Candidates for K, and whether the counts tell them apart."""
    rows = [
        (
            str(found.draft_tokens),
            f"{found.ms:.3f}",
            f"{found.tokens_per_round:.3f}",
            _interval(found.tokens_interval, ".3f"),
            f"{found.tokens_per_second:.1f}",
            _interval(found.speed_interval, ".1f"),
            f"{found.best_share:.1%}",
        )
        for found in best.candidates
    ]
    head = ("K", "ms", "tokens", "95 % interval", "tokens/s", "95 % interval", "is best")
    verdict = (
        f"K = {best.draft_tokens}"
        if best.is_resolved
        else (f"not resolved; K = {best.draft_tokens} has the highest expectation")
    )
    return f"{text_table(head, rows)}expected best: {verdict}\n"


def _totals(executor: ExecutorProfile) -> str:
    text = (
        f"{executor.name}, {executor.context} tokens of context: floor {executor.floor_us:.1f} us"
    )
    measured, attributed = executor.measured, executor.attributed_us
    if measured is not None:
        text += f", measured {measured.median:.1f} us +- {measured.spread:.1f}"
        if attributed is not None:
            text += (
                f" = {attributed:.1f} us of nodes and "
                f"{measured.median - attributed:.1f} us unattributed"
            )
    return text + "\n"


def _groups(executor: ExecutorProfile, by: str) -> dict[str, list[NodeProfile]]:
    """Nodes by region (layers that differ in their number only are one), op or name."""
    names: dict[str, Callable[[NodeProfile], str]] = {
        "region": lambda node: _NUMBER.sub(".*", node.region),
        "op": lambda node: node.op,
        "node": lambda node: node.name,
    }
    groups: dict[str, list[NodeProfile]] = {}
    for node in executor.nodes():
        groups.setdefault(names[by](node), []).append(node)
    return groups


def _part(name: str, nodes: Sequence[NodeProfile], executor: ExecutorProfile) -> tuple[str, ...]:
    floor = sum(node.floor_us for node in nodes)
    times = [node.time_us for node in nodes if node.time_us is not None]
    bounds = Counter(node.bound for node in nodes)
    runners = dict.fromkeys(node.implementation for node in nodes)
    return (
        name,
        str(len(nodes)),
        f"{floor:.2f}",
        f"{sum(times):.2f}" if times else "",
        f"{sum(map(executor.fraction, nodes)):.1%}",
        f"{sum(times) / floor:.2f}" if times and floor else "",
        size_text(sum(node.read_bytes for node in nodes)),
        size_text(sum(node.write_bytes for node in nodes)),
        f"{sum(node.flops for node in nodes) / 1e9:.3f}",
        bounds.most_common(1)[0][0],
        ", ".join(runners),
    )


def narrowed(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that no row fills."""
    kept = [at for at in range(len(head)) if at == 0 or any(row[at] for row in rows)]
    return text_table([head[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def bytes_text(value: int | None) -> str:
    return "" if value is None else size_text(value)


def _interval(interval: Interval, form: str) -> str:
    return f"{interval.low:{form}} .. {interval.high:{form}}"
