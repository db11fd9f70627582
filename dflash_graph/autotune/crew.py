"""Crew: worker processes, one on each card, that share one queue of tasks.

A worker is handed the next task when it has decided the one before, so cards that are faster, or
whose tasks are smaller, do more of them. A worker that dies costs no more than its task: another
takes it up once more, with what was measured of it; where that dies too the task has failed.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Final

from dflash_graph.autotune import worker as workers
from dflash_graph.autotune.cards import Card
from dflash_graph.autotune.decision import Decision
from dflash_graph.autotune.spaces import Candidate
from dflash_graph.autotune.tasks import Task
from dflash_graph.autotune.worker import Decided, Job, Lost, Message, Progress, Refused, Setup
from dflash_graph.choices import Choices
from dflash_graph.errors import TuningError

#: Times that a task is handed out, and deaths in a row after which a card is given up.
_TRIES: Final = 2
_DEATHS: Final = 3 * _TRIES
#: Seconds in which workers that are to end may finish what they measure.
_GRACE: Final = 20.0
#: How processes are started: CUDA does not survive a fork.
_START: Final = "spawn"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tuned:
    """A task that is done with.

    Args:
        index: of the task, as tasks were given.
        device: index of the card whose worker had it last.
        measured: measurements that were made of it.
    """

    index: int
    decision: Decision
    device: int
    measured: int

    def document(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **self.decision.document(),
            "device_index": self.device,
            "measured": self.measured,
        }


@dataclass(frozen=True)
class Running:
    """What a card is busy with: a task's name, candidates done, and their number."""

    task: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class _Item:
    """A task of the queue; what died workers measured of it is counted here."""

    index: int
    task: Task
    incumbent: Candidate
    tries: int = 0
    measured: int = 0


@dataclass
class _Worker:
    card: Card
    process: BaseProcess
    connection: Connection
    is_ready: bool = False
    item: _Item | None = None
    measured: int = 0


class Crew:
    """Decides tasks on several cards; to be used in a `with` statement, which ends all workers.

    Args:
        cards: one worker at a time is on each.
        setup: of every worker.
        budget: seconds, from construction on; None: no end.
        progress: called when `running` or `finished` has changed, with the index of a card.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        setup: Setup,
        budget: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.setup = setup
        self.progress = progress
        #: By index of a card.
        self.running: dict[int, Running] = {}
        #: Tasks that are done with.
        self.finished = 0
        self._cards = cards
        self._budget = budget
        self._start_time = time.monotonic()
        self._workers: list[_Worker] = []
        self._waiting: deque[_Item] = deque()
        self._deaths: Counter[int] = Counter()
        self._handler: Any = None

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        if self._budget is None:
            return float("inf")
        return self._budget - (time.monotonic() - self._start_time)

    def __enter__(self) -> Crew:
        # SIGTERM would end this process and leave its workers to themselves.
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end(self._workers)
        finally:
            if self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)

    def decide(self, tasks: Sequence[Task], choices: Choices) -> Iterator[Tuned]:
        """Decide tasks; each is given when it is done with, in no order.

        Args:
            tasks: those that `Setup.tasks` finds, or some of them; handed out in this order.
            choices: what runs now.

        Raises:
            ProfileError: the journal cannot be written.
            DeviceMemoryError: a task does not fit on a card.
            TuningError: no card is left that measures.
        """
        items = (_Item(i, task, task.incumbent(choices)) for i, task in enumerate(tasks))
        self._waiting = deque(items)
        for card in self._cards[: len(tasks)]:
            self._start(card)
        while self.finished < len(tasks):
            for one in self._workers:
                self._hand_out(one)
            for connection in wait([one.connection for one in self._workers]):
                one = next(one for one in self._workers if one.connection is connection)
                tuned = self._take(one, self._heard(one))
                if tuned is not None:
                    self.finished += 1
                    self._say(one.card)
                    yield tuned

    def _start(self, card: Card) -> None:
        context: Any = multiprocessing.get_context(_START)
        here, there = context.Pipe()
        process = context.Process(target=workers.work, args=(there, card, self.setup), daemon=True)
        # A child inherits what is blocked: Ctrl-C must not reach it before it says so itself. The
        # tracker that multiprocessing starts with the first child unblocks it.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            self._workers.append(_Worker(card, process, here))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()

    def _hand_out(self, one: _Worker) -> None:
        """The next task, if a worker is free."""
        if not one.is_ready or one.item is not None or not self._waiting:
            return
        item = self._waiting.popleft()
        one.item, one.measured = replace(item, tries=item.tries + 1), 0
        self.running[one.card.index] = Running(item.task.name)
        left = None if self._budget is None else self.left
        with suppress(ConnectionError):  # it has died, which is heard next
            one.connection.send(Job(item.task.name, item.incumbent, left))

    def _heard(self, one: _Worker) -> Message:
        try:
            message: Message = one.connection.recv()
        except (EOFError, OSError):
            one.process.join(_GRACE)
            return Lost(f"its process ended with {_status(one.process.exitcode)}", one.measured)
        return message

    def _take(self, one: _Worker, message: Message) -> Tuned | None:
        """What a message comes to: a task that is done with, or None."""
        if isinstance(message, Refused):
            raise message.error
        if isinstance(message, Lost):
            return self._lost(one, message)
        if isinstance(message, Decided):
            assert one.item is not None, "a worker decides what it was handed"
            item, one.item = one.item, None
            self._deaths[one.card.index] = 0
            decision = Decision(item.task, **message.decision)
            return self._done(one, item, decision, message.measured)
        if isinstance(message, Progress):
            assert one.item is not None, "a worker measures what it was handed"
            name = one.item.task.name
            self.running[one.card.index] = Running(name, message.done, message.total)
            one.measured = message.measured
            self._say(one.card)
        else:
            one.is_ready = True
        return None

    def _lost(self, one: _Worker, lost: Lost) -> Tuned | None:
        self._workers.remove(one)
        self._end([one], grace=0.0)
        self.running.pop(one.card.index, None)
        self._deaths[one.card.index] += 1
        tuned = None
        what = f"device {one.card.index}: {lost.message}"
        if one.item is None:
            logger.warning("%s", what)
        elif one.item.tries < _TRIES:
            logger.warning("%s; %s is tried once more", what, one.item.task.name)
            self._waiting.appendleft(replace(one.item, measured=one.item.measured + lost.measured))
        else:
            logger.warning("%s; %s has failed", what, one.item.task.name)
            decision = Decision(one.item.task, "failed", one.item.incumbent, message=lost.message)
            tuned = self._done(one, one.item, decision, lost.measured)
        if self._waiting:
            if one.is_ready and self._deaths[one.card.index] < _DEATHS:
                self._start(one.card)
            else:
                logger.warning("device %d: it is given up", one.card.index)
        if self._waiting and not self._workers:
            raise TuningError(
                f"devices: expected one that measures, got none: {what}; what was measured is in "
                f"{self.setup.journal}: the same command goes on from there"
            )
        return tuned

    def _done(self, one: _Worker, item: _Item, decision: Decision, measured: int) -> Tuned:
        self.running.pop(one.card.index, None)
        return Tuned(item.index, decision, one.card.index, item.measured + measured)

    def _say(self, card: Card) -> None:
        if self.progress is not None:
            self.progress(card.index)

    def _end(self, ended: Sequence[_Worker], grace: float = _GRACE) -> None:
        """End workers: what they measure is kept, where that takes no longer than `grace`."""
        end = time.monotonic() + grace
        try:
            for one in ended:
                one.process.terminate()
            for one in ended:
                one.process.join(max(0.0, end - time.monotonic()))
        finally:
            for one in ended:
                one.process.kill()
                one.process.join(_GRACE)
                # Not before: what a worker says to nobody would end it with something not kept.
                one.connection.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _status(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"status {code}"
