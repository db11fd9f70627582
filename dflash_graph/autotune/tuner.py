"""Tuner: searches the space of a task, with everything it learns in the journal.

First every order of sums (tiles and warps) is measured as what runs now is launched. The fastest of
them are then measured with every number of stages and way of launching; stages are chosen for each
row tile. The two fastest and the incumbent take turns in a last measurement, which decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from dflash_graph.autotune.decision import Decision, decide, total
from dflash_graph.autotune.journal import Journal, Outcome, record_key
from dflash_graph.autotune.spaces import Candidate, Limits
from dflash_graph.autotune.tasks import Task
from dflash_graph.choices import FREE_TILES, Variation, may_vary
from dflash_graph.errors import TuningError
from dflash_graph.profile_store import Identity, template_hash

#: Candidates that take turns in one measurement.
BATCH: Final = 6
#: Orders of sums that are refined.
KEPT: Final = 3
#: Repeats of a candidate, and of a finalist.
TURNS: Final = 9
FINAL_TURNS: Final = 31

#: Called with a task's name, candidates done, and their number as far as it is known.
Progress = Callable[[str, int, int], None]


class Measurer(Protocol):
    """Runs candidates on a device; one of a test's own needs none."""

    @property
    def limits(self) -> Limits:
        """What candidates must fit."""

    def compile(self, task: Task, candidates: Sequence[Candidate]) -> None:
        """Compile what is not cached yet; what does not compile is found by `measure`."""

    def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        """Check each candidate, and time those that are right in turn, all calls of the task.

        A candidate that fails or is wrong is an outcome, not an error.

        Raises:
            DeviceLost: nothing more can be measured in this process.
        """


class DeviceLost(Exception):
    """A candidate left the device unusable for this process.

    Args:
        candidate: it.
        message: what the device said.
    """

    def __init__(self, candidate: Candidate, message: str) -> None:
        super().__init__(message)
        self.candidate = candidate


class OutOfBudget(Exception):
    """The time for tuning has ended; never leaves this module."""


@dataclass
class Tuner:
    """Decides tasks within a budget.

    Args:
        measurer: what runs candidates.
        journal: what is known, and is to be kept.
        identity: the device and versions that measurements hold for.
        budget: seconds, from construction on; None: no end.
        progress: called before each measurement.
        clock: seconds.
    """

    measurer: Measurer
    journal: Journal
    identity: Identity
    budget: float | None = None
    progress: Progress | None = None
    clock: Callable[[], float] = time.monotonic
    #: Measurements that were made, not found in the journal.
    measured: int = 0
    _start: float = field(init=False)
    _identity: tuple[Task, dict[str, Any]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        if self.budget is None:
            return float("inf")
        return self.budget - (self.clock() - self._start)

    def tune(self, task: Task, incumbent: Candidate) -> Decision:
        """Decide one task; unfinished if the budget ends before.

        Raises:
            TuningError: a candidate left the device unusable; it is in the journal as failed.
            ProfileError: the journal cannot be written.
        """
        space, n, limits = task.space, task.sizes, self.measurer.limits
        search = _Search(task)
        try:
            explored = space.explore(n, task.dtype, limits, incumbent)
            self._measure(search, explored, more=len(space.depths) * (KEPT + 1))
            refined = space.refine(n, task.dtype, limits, search.best(KEPT))
            self._measure(search, refined)
            ranked = [found for found in search.composed() if not self._has_failed(task, found)]
            # Row tiles that differ may turn out not to agree: one whose do not is always there.
            alike = [candidate for candidate in ranked if not candidate.own][:1]
            last = [] if self._has_failed(task, incumbent) else [incumbent]
            finalists = list(dict.fromkeys([*ranked[:2], *alike, *last]))
            outcomes = self._final(task, finalists)
        except OutOfBudget:
            return Decision(
                task, "unfinished", incumbent, tried=len(search.found), failed=search.failed
            )
        return decide(
            task, incumbent, finalists, outcomes, tried=len(search.found), failed=search.failed
        )

    def identity_of(self, task: Task) -> dict[str, Any]:
        """What a measurement of a task holds for."""
        if self._identity is None or self._identity[0] is not task:
            self._identity = task, self._identify(task)
        return self._identity[1]

    def _identify(self, task: Task) -> dict[str, Any]:
        return {
            "calls": record_key(
                [
                    (c.label, c.launches, str(sorted(c.specs.items())), str(c.attributes))
                    for c in task.calls
                ]
            ),
            "device": self.identity.device,
            "capability": self.identity.capability,
            "versions": dict(self.identity.versions),
            "templates": {part.op: template_hash(part.op) for part in task.parts},
        }

    def _key(self, task: Task, *what: object) -> str:
        return record_key(task.name, self.identity_of(task), *what)

    def _measure(self, search: _Search, candidates: Sequence[Candidate], more: int = 0) -> None:
        """Measure what the journal does not hold."""
        task = search.task
        waiting = []
        for candidate in candidates:
            known = self._known(task, candidate)
            if known is None:
                waiting.append(candidate)
            else:
                search.found[candidate] = known
        done = len(candidates) - len(waiting)
        for start in range(0, len(waiting), BATCH):
            if self.progress is not None:
                self.progress(task.name, done + start, len(candidates) + more)
            self._check_budget()
            batch = waiting[start : start + BATCH]
            if start % (8 * BATCH) == 0:
                self.measurer.compile(task, waiting[start : start + 8 * BATCH])
                self._check_budget()
            outcomes = self._run(task, batch, TURNS)
            for candidate, outcome in zip(batch, outcomes, strict=True):
                search.found[candidate] = self._keep(task, candidate, outcome)

    def _run(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        try:
            outcomes = self.measurer.measure(task, candidates, turns)
        except DeviceLost as lost:
            self._keep(task, lost.candidate, Outcome("failed", f"lost the device: {lost}"))
            raise TuningError(
                f"{task.name}: expected {lost.candidate} to run, got {lost}; it is noted as "
                f"failed in {self.journal.path}: the same command goes on without it"
            ) from lost
        self.measured += len(outcomes)
        return outcomes

    def _own_key(self, task: Task, candidate: Candidate) -> str:
        """Of what is known of a candidate by itself, without company."""
        return self._key(task, "candidate", candidate.document())

    def _known(self, task: Task, candidate: Candidate) -> Outcome | None:
        return self.journal.get(self._own_key(task, candidate))

    def _keep(self, task: Task, candidate: Candidate, outcome: Outcome) -> Outcome:
        about = self._about(task, "candidate", candidate)
        return self.journal.add(self._own_key(task, candidate), outcome, about)

    def _has_failed(self, task: Task, candidate: Candidate) -> bool:
        """Whether it is noted as failed: alone, or when a final lost the device by it."""
        known = self._known(task, candidate)
        return known is not None and known.status == "failed"

    def _final(self, task: Task, finalists: Sequence[Candidate]) -> list[Outcome]:
        """The finalists in turn; known only where the very same were measured together."""
        company = [candidate.document() for candidate in finalists]
        keys = [self._key(task, "final", company, candidate) for candidate in company]
        known = [self.journal.get(key) for key in keys]
        found = [outcome for outcome in known if outcome is not None]
        if len(found) == len(known):
            return found
        self._check_budget()
        self.measurer.compile(task, finalists)
        outcomes = self._run(task, finalists, FINAL_TURNS)
        return [
            self.journal.add(key, outcome, self._about(task, "final", candidate))
            for key, candidate, outcome in zip(keys, finalists, outcomes, strict=True)
        ]

    def _about(self, task: Task, kind: str, candidate: Candidate) -> dict[str, Any]:
        return {
            "kind": kind,
            "task": task.name,
            "candidate": candidate.document(),
            "identity": self.identity_of(task),
        }

    def _check_budget(self) -> None:
        if self.left <= 0:
            raise OutOfBudget


class _Search:
    """What is known of one task's candidates."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.found: dict[Candidate, Outcome] = {}

    @property
    def failed(self) -> int:
        return sum(outcome.status != "ok" for outcome in self.found.values())

    def _good(self) -> list[tuple[Candidate, Outcome]]:
        good = [(c, o) for c, o in self.found.items() if o.status == "ok"]
        return sorted(good, key=lambda pair: total(self.task, pair[1].samples))

    def best(self, count: int) -> list[Candidate]:
        """The fastest candidates that are right, of different orders of sums, and that of each row
        tile.
        """
        good = self._good()
        orders: dict[tuple[object, ...], Candidate] = {}
        for candidate, _ in good:
            orders.setdefault(candidate.order, candidate)
        found = dict(list(orders.items())[:count])
        for rows in self.task.buckets if good else ():
            quickest, _ = min(good, key=lambda pair: self._time(pair[1], rows))
            found.setdefault(quickest.order, quickest)
        return list(found.values())

    def _time(self, outcome: Outcome, rows: int) -> float:
        """Of a round's launches with this row tile."""
        calls = [call for call in self.task.calls if call.rows == rows]
        return sum(call.launches * _median(outcome.samples[call.label]) for call in calls)

    def composed(self) -> list[Candidate]:
        """For each order of sums the best stages of each row tile, or what else of it leaves bits
        alone; the fastest first. A final checks that row tiles agree.
        """
        orders: dict[tuple[object, ...], list[tuple[Candidate, Outcome]]] = {}
        for candidate, outcome in self._good():
            for key in dict.fromkeys((candidate.order, self._same_bits(candidate))):
                orders.setdefault(key, []).append((candidate, outcome))
        made = [self._composed(members) for members in orders.values()]
        found = [candidate for _, candidate in sorted(made, key=lambda pair: pair[0])]
        return list(dict.fromkeys(found))

    def _same_bits(self, candidate: Candidate) -> tuple[object, ...]:
        """What is equal for candidates that give the same bits, as far as is known beforehand."""
        each = [candidate.choice(rows) for rows in self.task.buckets]
        if not all(may_vary(choice.tiles, self.task.dtype) for choice in each):
            return candidate.order
        kept = [(k, v) for k, v in candidate.tiles if k not in FREE_TILES]
        return "may vary", tuple(kept), candidate.pdl

    def _composed(self, members: Sequence[tuple[Candidate, Outcome]]) -> tuple[float, Candidate]:
        """The best of `members` for each row tile, as one candidate, and its time."""
        time, best = 0.0, {}
        for rows in self.task.buckets:
            times = [self._time(outcome, rows) for _, outcome in members]
            time += min(times)
            best[rows] = members[times.index(min(times))][0].choice(rows)
        first = next(iter(best.values()))
        own = {
            rows: Variation(
                {k: v for k, v in choice.tiles.items() if v != first.tiles.get(k)},
                None if choice.num_warps == first.num_warps else choice.num_warps,
            )
            for rows, choice in best.items()
            if (choice.tiles, choice.num_warps) != (first.tiles, first.num_warps)
        }
        stages = {rows: choice.num_stages for rows, choice in best.items()}
        return time, Candidate.make(first.tiles, first.num_warps, stages, first.pdl, own)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
