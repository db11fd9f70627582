"""difference: what changed between two profiles, and whether a round became slower.

Nodes are paired by executor, segment and name. Rounds are compared by the ratio of their medians
with a bootstrap interval where both were repeated, nodes by a sign test over all that were timed in
both. Where a profile has no times, floors at the first profile's ceiling are compared: they show
what a graph came to move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Literal

from dflash_graph.errors import ProfileError
from dflash_graph.profile.document import Profile
from dflash_graph.profile.floors import node_floor_us
from dflash_graph.profile.parts import Ceiling, ExecutorProfile, NodeProfile
from dflash_graph.profile.sampling_statistics import Interval, ratio_interval, sign_test


@dataclass(frozen=True)
class FieldChange:
    """A field with its values before and after."""

    field: str
    before: str
    after: str


@dataclass(frozen=True)
class NodeChange:
    """A node that is in both profiles and not the same.

    Args:
        executor, segment, node: where it stands.
        fields: what changed of it, but times.
    """

    executor: str
    segment: str
    node: str
    fields: tuple[FieldChange, ...]


@dataclass(frozen=True)
class RoundChange:
    """How an executor's whole round changed, after over before.

    Args:
        executor: its name.
        basis: `measured`, or `floor` where not both were timed.
        before, after: microseconds, medians.
        interval: of the ratio; None without repeats.
        nodes: nodes that were timed in both.
        faster, slower: of them.
        sign_p: sign test over them.
        node_ratio: geometric mean of their ratios; None without such nodes.
    """

    executor: str
    basis: Literal["measured", "floor"]
    before: float
    after: float
    interval: Interval | None = None
    nodes: int = 0
    faster: int = 0
    slower: int = 0
    sign_p: float = 1.0
    node_ratio: float | None = None

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else 1.0

    @property
    def is_resolved(self) -> bool:
        """Whether the difference is more than noise; floors are exact, and a single measurement
        has only itself.
        """
        return self.interval is None or not self.interval.holds(1.0)

    def exceeds(self, limit: float) -> bool:
        """Whether the round became slower by more than a share, beyond noise."""
        return self.ratio - 1 > limit and self.is_resolved


@dataclass(frozen=True)
class NodeTimes:
    """A node that was timed in both profiles, microseconds."""

    executor: str
    segment: str
    node: str
    before: float
    after: float


@dataclass(frozen=True)
class MemoryChange:
    """Bytes of one class; actual where both profiles have it, else planned; None: not there."""

    name: str
    before: int | None
    after: int | None


@dataclass(frozen=True)
class Difference:
    """Everything that changed from one profile to another.

    Args:
        identity: fields of the head.
        executors_removed, executors_added: names.
        removed, added: nodes as (executor, segment, node).
        changed: nodes with another implementation, config, source, resources or cost.
        rounds: of executors that are in both.
        times: nodes timed in both, by what they gained or lost, largest first.
        memory: classes whose bytes changed.
    """

    identity: tuple[FieldChange, ...]
    executors_removed: tuple[str, ...]
    executors_added: tuple[str, ...]
    removed: tuple[tuple[str, str, str], ...]
    added: tuple[tuple[str, str, str], ...]
    changed: tuple[NodeChange, ...]
    rounds: tuple[RoundChange, ...]
    times: tuple[NodeTimes, ...]
    memory: tuple[MemoryChange, ...]

    def slower_than(self, limit: float) -> tuple[RoundChange, ...]:
        """Rounds that became slower by more than `limit` (0.03 is 3 %), beyond noise."""
        return tuple(found for found in self.rounds if found.exceeds(limit))


def difference(before: Profile, after: Profile) -> Difference:
    """Compare two profiles.

    Raises:
        ProfileError: they have no executor in common.
    """
    old = {found.name: found for found in before.executors}
    new = {found.name: found for found in after.executors}
    common = [name for name in old if name in new]
    if not common:
        raise ProfileError(
            f"diff: expected an executor that both profiles have, got {sorted(old)} and "
            f"{sorted(new)}"
        )
    removed: list[tuple[str, str, str]] = []
    added: list[tuple[str, str, str]] = []
    changed: list[NodeChange] = []
    times: list[NodeTimes] = []
    rounds = []
    for name in common:
        was, now = _nodes(old[name]), _nodes(new[name])
        removed += [(name, *key) for key in was if key not in now]
        added += [(name, *key) for key in now if key not in was]
        own: list[NodeTimes] = []
        for key in was:
            if key not in now:
                continue
            fields = _node_fields(was[key], now[key])
            if fields:
                changed.append(NodeChange(name, *key, fields))
            first, second = was[key].time_us, now[key].time_us
            if first is not None and second is not None:
                own.append(NodeTimes(name, *key, first, second))
        times += own
        rounds.append(_round(old[name], new[name], own, before.ceiling))
    return Difference(
        _identity(before, after),
        tuple(name for name in old if name not in new),
        tuple(name for name in new if name not in old),
        tuple(removed),
        tuple(added),
        tuple(changed),
        tuple(rounds),
        tuple(sorted(times, key=lambda found: -abs(found.after - found.before))),
        _memory(before, after),
    )


def _nodes(executor: ExecutorProfile) -> dict[tuple[str, str], NodeProfile]:
    return {
        (segment.name, node.name): node for segment in executor.segments for node in segment.nodes
    }


def _round(
    before: ExecutorProfile,
    after: ExecutorProfile,
    times: list[NodeTimes],
    ceiling: Ceiling,
) -> RoundChange:
    if before.measured is None or after.measured is None:
        first, second = (
            sum(node_floor_us(node, ceiling) for node in executor.nodes())
            for executor in (before, after)
        )
        return RoundChange(before.name, "floor", first, second)
    faster = sum(found.after < found.before for found in times)
    slower = sum(found.after > found.before for found in times)
    ratios = [found.after / found.before for found in times if found.before and found.after]
    return RoundChange(
        before.name,
        "measured",
        before.measured.median,
        after.measured.median,
        ratio_interval(before.measured.values, after.measured.values),
        len(times),
        faster,
        slower,
        sign_test(faster, slower),
        geometric_mean(ratios) if ratios else None,
    )


def _node_fields(before: NodeProfile, after: NodeProfile) -> tuple[FieldChange, ...]:
    return _changes(_facts(before), _facts(after))


def _facts(node: NodeProfile) -> dict[str, str]:
    facts = {
        "op": node.op,
        "implementation": node.implementation,
        "source": node.source,
        "template": node.config.template if node.config else "-",
        "warps": str(node.config.num_warps) if node.config else "-",
        "stages": str(node.config.num_stages) if node.config else "-",
        "read bytes": str(node.read_bytes),
        "written bytes": str(node.write_bytes),
        "flops": str(node.flops),
    }
    if node.config is not None:
        facts |= {f"hole {name}": str(value) for name, value in sorted(node.config.holes.items())}
    for kernel in node.resources:
        facts[f"{kernel.kernel}: registers"] = str(kernel.registers)
        facts[f"{kernel.kernel}: shared bytes"] = str(kernel.shared_bytes)
        facts[f"{kernel.kernel}: spill bytes"] = str(kernel.spill_bytes)
    return facts


def _identity(before: Profile, after: Profile) -> tuple[FieldChange, ...]:
    return _changes(_head(before), _head(after))


def _head(profile: Profile) -> dict[str, str]:
    identity = profile.identity
    return {
        "name": identity.name,
        "device": identity.device.name,
        "capability": str(identity.device.capability),
        "driver": str(identity.device.driver),
        **{f"version of {name}": found for name, found in identity.versions.items()},
        "geometry": identity.geometry_hash,
        "choices": identity.choices,
        **{f"option {name}": str(found) for name, found in identity.options.items()},
    }


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[FieldChange, ...]:
    return tuple(
        FieldChange(name, before.get(name, "-"), after.get(name, "-"))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    )


def _memory(before: Profile, after: Profile) -> tuple[MemoryChange, ...]:
    old = {found.name: found for found in before.memory}
    new = {found.name: found for found in after.memory}
    changes = []
    for name in dict.fromkeys((*old, *new)):
        was, now = old.get(name), new.get(name)
        has_actual = all(found is None or found.actual_bytes is not None for found in (was, now))
        first, second = (
            None if found is None else found.actual_bytes if has_actual else found.planned_bytes
            for found in (was, now)
        )
        if first != second:
            changes.append(MemoryChange(name, first, second))
    return tuple(changes)
