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
            self._measure(search, explored, more=len(space.depths) * KEPT)
            refined = space.refine(n, task.dtype, limits, search.best(KEPT))
            self._measure(search, refined)
            finalists = list(dict.fromkeys([*search.composed()[:2], incumbent]))
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
            known = self.journal.get(self._key(task, "candidate", candidate.document()))
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

    def _keep(self, task: Task, candidate: Candidate, outcome: Outcome) -> Outcome:
        key = self._key(task, "candidate", candidate.document())
        return self.journal.add(key, outcome, self._about(task, "candidate", candidate))

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
        """The fastest candidates that are right, of different orders of sums."""
        orders: dict[tuple[object, ...], Candidate] = {}
        for candidate, _ in self._good():
            orders.setdefault(candidate.order, candidate)
        return list(orders.values())[:count]

    def composed(self) -> list[Candidate]:
        """For each order of sums the best stages of each row tile; the fastest first."""
        groups: dict[tuple[object, ...], list[tuple[Candidate, Outcome]]] = {}
        for candidate, outcome in self._good():
            groups.setdefault(candidate.order, []).append((candidate, outcome))
        made: list[tuple[float, Candidate]] = []
        for members in groups.values():
            stages, time = {}, 0.0
            for rows in self.task.buckets:
                calls = [call for call in self.task.calls if call.rows == rows]
                by_stages = [
                    (
                        sum(c.launches * _median(o.samples[c.label]) for c in calls),
                        dict(candidate.num_stages)[rows],
                    )
                    for candidate, o in members
                ]
                best = min(by_stages)
                time, stages[rows] = time + best[0], best[1]
            first = members[0][0]
            made.append(
                (
                    time,
                    Candidate.make(
                        dict(first.tiles), first.num_warps, stages, first.pdl, first.variations
                    ),
                )
            )
        return [candidate for _, candidate in sorted(made, key=lambda pair: pair[0])]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
