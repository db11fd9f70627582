"""planner: lifetimes over a schedule, and one arena that holds every buffer.

A buffer lives from the step that writes it to the last step that reads it; a retained value lives
at least to the end of its segment and on to its last reader in a later one. Buffers whose lives
overlap never share bytes. Integers only: nothing here knows a device.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from dflash_graph.errors import PlanError
from dflash_graph.passes.schedule import Schedule

#: Every buffer starts at a multiple of this many bytes.
ALIGNMENT: Final = 256


@dataclass(frozen=True)
class Request:
    """A buffer to place: its size in bytes and its life as step numbers, both ends included."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Buffer:
    """A placed buffer. `values` are the values that use it one after another (in-place results)."""

    values: tuple[str, ...]
    offset: int
    nbytes: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Plan:
    """Where every stored value of some segments lies.

    Args:
        buffers: placed buffers, by offset, then start of life.
        arena_bytes: the peak: bytes the arena needs.
        lower_bound: the largest sum of simultaneously live (aligned) bytes; no placement needs
            less.
        steps: names of the steps, over all segments in order.
        boundaries: step number at which each segment starts.
    """

    buffers: tuple[Buffer, ...]
    arena_bytes: int
    lower_bound: int
    steps: tuple[str, ...]
    boundaries: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Peak over lower bound; 1.0 for an empty plan."""
        return self.arena_bytes / self.lower_bound if self.lower_bound else 1.0

    def offsets(self) -> dict[str, int]:
        """Offset in bytes of every stored value."""
        return {value: buffer.offset for buffer in self.buffers for value in buffer.values}

    def check(self) -> Plan:
        """Return the plan if all buffers lie inside the arena and no two live ones overlap.

        Raises:
            PlanError: a buffer is outside, or two share bytes; it names them and the step.
        """
        for buffer in self.buffers:
            if buffer.offset % ALIGNMENT or buffer.offset < 0 or buffer.end > self.arena_bytes:
                raise PlanError(
                    f"{buffer.values[0]}: bytes {buffer.offset}..{buffer.end} are outside the arena"
                )
        by_start = sorted(self.buffers, key=lambda b: b.first)
        live: list[Buffer] = []
        for buffer in by_start:
            live = [other for other in live if other.last >= buffer.first]
            for other in live:
                if buffer.offset < other.end and other.offset < buffer.end:
                    raise PlanError(
                        f"{buffer.values[0]} and {other.values[0]}: both live at step "
                        f"{buffer.first} ({self.steps[buffer.first]}) and share bytes"
                    )
            live.append(buffer)
        return self


def place(requests: Sequence[Request]) -> dict[str, int]:
    """Offsets in bytes for buffers, each at the lowest gap that is free for its whole life.

    Buffers that live at the widest step (the one with most live bytes) are placed first, then those
    of narrower steps: what sets the peak is placed while nothing is in its way, and the rest finds
    room around it. Among equals the longest lives come first, then the larger: a round's records
    and features, which live to its end, form a solid base on which the short-lived scratch of one
    layer after another reuses the same few bytes.
    """
    live = _live_bytes(requests)
    width = {r.name: max(live[r.first : r.last + 1]) for r in requests}
    order = sorted(
        requests, key=lambda r: (-width[r.name], r.first - r.last, -r.nbytes, r.first, r.name)
    )
    offsets: dict[str, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last), sorted
    for request in order:
        size, cursor = _aligned(request.nbytes), 0
        for offset, end, first, last in placed:
            if last < request.first or first > request.last:
                continue
            if offset - cursor >= size:
                break
            cursor = max(cursor, end)
        offsets[request.name] = cursor
        insort(placed, (cursor, cursor + size, request.first, request.last))
    return offsets


def lower_bound(requests: Sequence[Request]) -> int:
    """The largest sum of aligned bytes that live at one step."""
    return max(_live_bytes(requests), default=0)


def _live_bytes(requests: Sequence[Request]) -> list[int]:
    """Aligned bytes that live at each step."""
    change = [0] * (max((r.last for r in requests), default=-1) + 2)
    for request in requests:
        size = _aligned(request.nbytes)
        change[request.first] += size
        change[request.last + 1] -= size
    return list(accumulate(change))


def plan(schedules: Sequence[Schedule]) -> Plan:
    """Plan the arena of segments that run one after another.

    Those are a round's forward and finish, or a prefill chunk alone. Values with role ``output``
    live in the result frame and are not planned here.

    Raises:
        PlanError: two segments store values of one name, or have nodes of one name that both need
            workspace.
    """
    steps: list[str] = []
    boundaries: list[int] = []
    lives: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    owners: dict[str, str] = {}  # value -> first value of the buffer it shares
    for schedule in schedules:
        base = len(steps)
        boundaries.append(base)
        steps.extend(step.name for step in schedule.steps)
        end = len(steps) - 1
        values = schedule.graph.values
        for index, name in schedule.stored():
            if values[name].role == "output":
                continue
            readers = schedule.readers(name)
            last = base + max(readers[-1] if readers else index, index)
            if name in lives:
                raise PlanError(f"{name}: two segments store a value of this name; rename one")
            lives[name] = (base + index, end if values[name].role == "retained" else last)
            sizes[name] = values[name].spec.nbytes()
        for name in (v.name for v in schedule.graph.by_role("retained")):
            if name in lives and lives[name][0] < base and (readers := schedule.readers(name)):
                lives[name] = (lives[name][0], base + readers[-1])
        _share_in_place(schedule, base, lives, sizes, owners)
        for index, nbytes in enumerate(schedule.workspace):
            if nbytes:
                name = schedule.workspace_name(index)
                if name in lives:
                    raise PlanError(f"{name}: two segments have a node of this name; rename one")
                lives[name], sizes[name] = (base + index, base + index), nbytes
    groups: dict[str, list[str]] = {}
    for name in lives:
        groups.setdefault(_owner(owners, name), []).append(name)
    requests = [
        Request(
            owner,
            sizes[owner],
            min(lives[name][0] for name in names),
            max(lives[name][1] for name in names),
        )
        for owner, names in groups.items()
    ]
    offsets = place(requests)
    buffers = tuple(
        sorted(
            (
                Buffer(tuple(groups[r.name]), offsets[r.name], r.nbytes, r.first, r.last)
                for r in requests
            ),
            key=lambda b: (b.offset, b.first),
        )
    )
    arena = max((_aligned(b.end) for b in buffers), default=0)
    return Plan(buffers, arena, lower_bound(requests), tuple(steps), tuple(boundaries)).check()


def _share_in_place(
    schedule: Schedule,
    base: int,
    lives: Mapping[str, tuple[int, int]],
    sizes: Mapping[str, int],
    owners: dict[str, str],
) -> None:
    """Let an output take the buffer of an input that dies in its op, where the contract allows it.

    A retained value never gives its buffer away: a later segment may read it.
    """
    for index, step in enumerate(schedule.steps):
        if step.kind != "op":
            continue
        node = step.nodes[0]
        for output, argument in node.contract.in_place.items():
            source, result = node.inputs[argument], node.outputs[output]
            assert isinstance(source, str), f"{node.name}: an in-place source is one tensor"
            if source not in lives or result not in lives or sizes[source] != sizes[result]:
                continue
            if schedule.graph.values[source].role != "scratch":
                continue
            uses = sum(name == source for _, name in node.operands())
            if lives[source][1] == base + index and uses == 1:
                owners[result] = source


def _owner(owners: Mapping[str, str], name: str) -> str:
    while name in owners:
        name = owners[name]
    return name


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
