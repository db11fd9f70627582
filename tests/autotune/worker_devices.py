"""Devices that workers make, which are pickled: formulas that note what they measure, and fail when
a test wants it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_graph.autotune import Candidate, DeviceLost, Outcome, Task
from dflash_graph.autotune.cards import Card
from dflash_graph.errors import DeviceMemoryError

from .fake_device import FakeDevice

NOISE = 0.01


@dataclass(frozen=True)
class Devices:
    """Makes each worker's device.

    Args:
        folder: what is measured goes to a file for each card, and what has happened is marked.
        together: cards of which none measures before all have begun.
        fails: what happens at a measurement: ``"kill"``, ``"lose"``, ``"raise"``, ``"memory"``.
        at: the op of the task where it happens, and the number of candidates that it is given
            before.
        times: how often it happens.
        signals: the process that is told to end (by `signal`) at the measurement, instead.
        unfit: cards whose device cannot be made.
        seconds: that each measurement takes.
    """

    folder: Path
    together: int = 0
    fails: str = ""
    at: tuple[str, int] = ("", 0)
    times: int = 1
    signal: int = 0
    signals: int = 0
    unfit: tuple[int, ...] = ()
    seconds: float = 0.0

    def __call__(self, card: Card) -> Device:
        (self.folder / f"{card.index}.began").touch()
        if card.index in self.unfit:
            raise RuntimeError("CUDA error: device not ready\nand more")
        return Device(card, self)

    def happens(self) -> bool:
        """Whether what fails is to fail again; each time leaves a mark."""
        for number in range(self.times):
            try:
                (self.folder / f"happened{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def measured(self) -> dict[int, list[str]]:
        """What each card has measured: task and candidate."""
        files = {int(path.stem): path for path in self.folder.glob("*.log")}
        return {card: files[card].read_text().splitlines() for card in sorted(files)}


class Device(FakeDevice):
    """A card of a worker."""

    def __init__(self, card: Card, plan: Devices) -> None:
        super().__init__(NOISE)
        self._card, self._plan = card, plan
        self._given: dict[str, int] = {}

    def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        plan = self._plan
        self._wait_for_others()
        before = self._given.get(task.name, 0)
        self._given[task.name] = before + len(candidates)
        op, at = plan.at
        if task.parts[0].op == op and before <= at < before + len(candidates):
            self._fail(candidates[at - before])
        time.sleep(plan.seconds)
        found = super().measure(task, candidates, turns)
        with (plan.folder / f"{self._card.index}.log").open("a") as file:
            file.writelines(f"{task.name}: {candidate}\n" for candidate in candidates)
        return found

    def _wait_for_others(self) -> None:
        plan = self._plan
        end = time.monotonic() + 60
        while len(list(plan.folder.glob("*.began"))) < plan.together:
            assert time.monotonic() < end, "the other cards have not begun"
            time.sleep(0.01)

    def _fail(self, candidate: Candidate) -> None:
        plan = self._plan
        if not plan.happens():
            return
        if plan.signals:
            os.kill(plan.signals, plan.signal)
        elif plan.fails == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan.fails == "lose":
            raise DeviceLost(candidate, "an illegal memory access was encountered")
        elif plan.fails == "raise":
            raise RuntimeError("CUDA error: unspecified launch failure\nand more")
        elif plan.fails == "memory":
            raise DeviceMemoryError("a task: expected room for its tensors on the device, got none")


def measurer_on(card: Card, *, context: int, workers: int, identity: Any) -> FakeDevice:
    """In the place of `device.measurer_on`."""
    assert (context, workers) == (2048, 2) and identity.device
    return FakeDevice(NOISE)


def killer_on(card: Card, *, context: int, workers: int, identity: Any) -> FakeDevice:
    """The same, of devices that kill whoever measures."""

    class Killer(FakeDevice):
        def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
            os.kill(os.getpid(), signal.SIGKILL)
            return []

    return Killer()


def append(path: Path, writer: int, count: int) -> None:
    """Add records of some size to a journal, as fast as it goes."""
    from dflash_graph.autotune import Journal

    journal = Journal(path)
    for number in range(count):
        samples = {"call": [float(number)] * 3000}
        journal.add(f"{writer} {number}", Outcome("ok", "", samples), {"writer": writer})
