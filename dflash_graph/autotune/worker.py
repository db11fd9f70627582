"""Worker: a process that decides the tasks that it is handed, one after the other, on one card.

It ends when the other end of its connection is closed, on SIGTERM, and when it has lost its device.
What it measures is in the journal before it measures on; a journal is read anew for each task, so
that what another worker had measured of it before it died is known.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dflash_graph.autotune import cards
from dflash_graph.autotune.cards import Card
from dflash_graph.autotune.decision import Decision
from dflash_graph.autotune.journal import Journal, Outcome, first_line
from dflash_graph.autotune.spaces import Candidate, Limits
from dflash_graph.autotune.tasks import Task
from dflash_graph.autotune.tuner import DeviceLost, Measurer, Tuner
from dflash_graph.errors import DFlashGraphError, TuningError
from dflash_graph.profile_store import Identity


@dataclass(frozen=True)
class Setup:
    """What a worker is started with. It is pickled: functions are those of modules, or `partial`s
    of them.

    Args:
        measurer: makes what measures; called in the worker, which sees its card alone.
        tasks: finds the tasks; a worker finds them itself, because a task cannot be pickled.
        journal: the file.
        identity: the device and versions that measurements hold for.
    """

    measurer: Callable[[Card], Measurer]
    tasks: Callable[[], Sequence[Task]]
    journal: Path
    identity: Identity


@dataclass(frozen=True)
class Job:
    """One task for a worker.

    Args:
        left: seconds of the budget; None: no end.
    """

    task: str
    incumbent: Candidate
    left: float | None


@dataclass(frozen=True)
class Ready:
    """A worker has started."""


@dataclass(frozen=True)
class Progress:
    """A worker is about to measure.

    Args:
        done, total: candidates of its task, as `tuner.Progress`.
        measured: measurements that it has made of this task.
    """

    done: int
    total: int
    measured: int


@dataclass(frozen=True)
class Decided:
    """A task is decided.

    Args:
        decision: the fields of a `Decision` but the task.
    """

    decision: dict[str, Any]
    measured: int


@dataclass(frozen=True)
class Refused:
    """What a caller must mend: it ends the run."""

    error: DFlashGraphError


@dataclass(frozen=True)
class Lost:
    """A worker measures no more, and ends; its task, if it has one, is not decided."""

    message: str
    measured: int = 0


Message = Ready | Progress | Decided | Refused | Lost


def work(connection: Connection, card: Card, setup: Setup) -> None:
    """The whole life of a worker.

    Args:
        connection: takes each `Job`, and says each `Message`.
    """
    ending = _Ending()
    os.environ[cards.VARIABLE] = card.visible
    # The run that started this one has read the same files and said what is wrong with them.
    logging.getLogger("dflash_graph").setLevel(logging.ERROR)
    with suppress(EOFError, ConnectionError):  # nobody is there any more
        try:
            measurer = _Between(setup.measurer(card), ending)
            tasks = {task.name: task for task in setup.tasks()}
        except Exception as error:  # whatever it is, this card measures nothing
            connection.send(Lost(first_line(error)))
            return
        connection.send(Ready())
        while True:
            job = connection.recv()
            said = _decide(tasks[job.task], job, measurer, setup, connection)
            connection.send(said)
            if isinstance(said, Lost):
                return


def _decide(
    task: Task, job: Job, measurer: _Between, setup: Setup, connection: Connection
) -> Message:
    tuner = Tuner(measurer, Journal(setup.journal), setup.identity, job.left)

    def progress(name: str, done: int, total: int) -> None:
        measurer.ending.check()
        connection.send(Progress(done, total, tuner.measured))

    tuner.progress = progress
    try:
        with measurer.ending.later():
            decision = tuner.tune(task, job.incumbent)
    except TuningError as error:
        return Lost(_lost(error), tuner.measured)
    except DFlashGraphError as error:
        return Refused(error)
    except ConnectionError:
        raise
    except Exception as error:  # a device that is lost says so in its own words, and later
        return Lost(first_line(error), tuner.measured)
    values = {f.name: getattr(decision, f.name) for f in fields(Decision) if f.name != "task"}
    return Decided(values, tuner.measured)


def _lost(error: TuningError) -> str:
    """Who did it, which the journal has."""
    cause = error.__cause__
    return f"{cause.candidate} lost it: {cause}" if isinstance(cause, DeviceLost) else str(error)


class _Ending:
    """What SIGTERM does: it ends the process at once, or when what is being measured is kept.

    Ctrl-C reaches every process of a terminal; only the one that started the workers heeds it.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._waits = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self._is_asked = True
        if not self._waits:
            self.check()

    def check(self) -> None:
        """End if that is asked for."""
        if self._is_asked:
            raise SystemExit(0)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Inside, the process ends at a `check` only."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        self.check()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, it ends wherever it is."""
        self._waits = False
        try:
            self.check()
            yield
        finally:
            self._waits = True


class _Between:
    """A measurer that may be interrupted while it compiles, which keeps nothing waiting."""

    def __init__(self, measurer: Measurer, ending: _Ending) -> None:
        self._measurer = measurer
        self.ending = ending

    @property
    def limits(self) -> Limits:
        return self._measurer.limits

    def compile(self, task: Task, candidates: Sequence[Candidate]) -> None:
        with self.ending.at_once():
            self._measurer.compile(task, candidates)

    def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        return self._measurer.measure(task, candidates, turns)
