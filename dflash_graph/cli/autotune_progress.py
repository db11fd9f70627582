"""How far tuning is: lines on stderr now and then, on a terminal text that changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dflash_graph.autotune import Task, Tuner
    from dflash_graph.autotune.crew import Crew

_Say = Callable[[str, int, int, float], None]


class _Began:
    """Notes what is being tuned and says how long it may take.

    Args:
        say: takes what is tuned, candidates done, their number, and seconds left.
    """

    def __init__(self, tuner: Tuner, tasks: tuple[Task, ...], say: _Say) -> None:
        self._tuner = tuner
        self._tasks = tasks
        self._say = say
        self._index = 0
        self._start = time.monotonic()
        tuner.progress = self.progress

    def __call__(self, index: int, task: Task) -> None:
        self._index = index

    def progress(self, name: str, done: int, total: int) -> None:
        left = _seconds_left(self._start, self._index + done / max(1, total), len(self._tasks))
        left = min(left, self._tuner.left)
        self._say(f"{self._index + 1} of {len(self._tasks)}  {name}", done, total, left)


@contextmanager
def progress(tuner: Tuner, tasks: tuple[Task, ...]) -> Iterator[_Began]:
    """The progress of one device."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("tuning") as status:

            def say(what: str, done: int, total: int, left: float) -> None:
                status.update(f"{what}: {done} of {total}{_left(left)}")

            yield _Began(tuner, tasks, say)
    else:
        yield _Began(tuner, tasks, _lines())


@contextmanager
def shared_progress(crew: Crew, count: int) -> Iterator[None]:
    """The progress of several devices on `count` tasks: of all on a terminal, else of that which
    has something new.
    """
    start = time.monotonic()

    def head() -> str:
        begun = sum(running.done / max(1, running.total) for running in crew.running.values())
        left = min(_seconds_left(start, crew.finished + begun, count), crew.left)
        return f"{crew.finished} of {count} tasks{_left(left)}"

    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting workers") as status:

            def show(device: int) -> None:
                rows = (
                    f"\n  device {index}  {running.task}: {running.done} of {running.total}"
                    for index, running in sorted(crew.running.items())
                )
                status.update(head() + "".join(rows))

            crew.progress = show
            yield
    else:
        says: dict[int, _Say] = {}

        def line(device: int) -> None:
            running = crew.running.get(device)
            if running is not None:
                say = says.setdefault(device, _lines())
                what = f"{head()}; device {device}  {running.task}"
                say(what, running.done, running.total, float("inf"))

        crew.progress = line
        yield


def _lines() -> _Say:
    """Says a line on stderr now and then."""
    said = time.monotonic()

    def say(what: str, done: int, total: int, left: float) -> None:
        nonlocal said
        now = time.monotonic()
        if done and now - said < 10.0:
            return
        said = now
        typer.echo(f"{what}: {done} of {total} candidates{_left(left)}", err=True)

    return say


def _seconds_left(start: float, done: float, count: int) -> float:
    """What is left if it goes on as it went."""
    share = done / count if count else 0.0
    return (time.monotonic() - start) * (1 - share) / share if share else float("inf")


def _left(seconds: float) -> str:
    if seconds == float("inf"):
        return ""
    seconds = max(0.0, seconds)
    return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"
