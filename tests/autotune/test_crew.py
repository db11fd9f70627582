"""Several cards that share one queue: results, deaths, interrupts, budgets; on devices that are
formulas, in processes that are real.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.autotune import Decision, Journal, Task, Tuner, crew, find_tasks, worker
from dflash_graph.autotune import session as sessions
from dflash_graph.autotune.cards import Card
from dflash_graph.autotune.crew import Crew, Tuned
from dflash_graph.autotune.report import decisions_text
from dflash_graph.autotune.worker import Job, Progress, Ready, Setup
from dflash_graph.choices import Choices
from dflash_graph.errors import DeviceMemoryError, TuningError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile_store import Identity
from dflash_graph.profiles import load_preset

from .fake_device import LIMITS, FakeDevice
from .worker_devices import NOISE, Devices, append

CARDS = (Card(0, "0", "GPU-0"), Card(1, "1", "GPU-1"))


def find(preset: str, *ops: str) -> partial[tuple[Task, ...]]:
    """What a worker finds its tasks with."""
    found = load_preset(preset)
    pair = ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype="bfloat16",
    )
    return partial(find_tasks, pair, draft_tokens=7, max_batch=4, ops=ops)


FIND = find("demo-dflash2", "rms_norm", "rope_append", "gdn_mixer", "linear_norm")


pytestmark = pytest.mark.usefixtures("quick_starts")


@pytest.fixture(scope="module")
def tasks() -> tuple[Task, ...]:
    return FIND()


@pytest.fixture
def choices(identity: Identity) -> Choices:
    return Choices(identity.device, identity.capability)


Whole = tuple[list[Decision], int, Path, Path]


@pytest.fixture
def whole(tasks: Sequence[Task], tmp_path: Path, identity: Identity, choices: Choices) -> Whole:
    """One device's run: decisions, measurements, profile, journal."""
    profile, journal = tmp_path / "whole.json", tmp_path / "whole.jsonl"
    tuner = Tuner(FakeDevice(NOISE), Journal(journal), identity)
    decisions = list(sessions.tune(tasks, tuner, choices, profile))
    return decisions, tuner.measured, profile, journal


class Runner:
    """Runs of two cards; `devices` is a folder for each plan, journal and profile are for all."""

    def __init__(self, folder: Path, identity: Identity, choices: Choices) -> None:
        self.journal, self.profile = folder / "journal.jsonl", folder / "profile.json"
        self._folder, self._identity, self._choices = folder, identity, choices

    def plan(self, **what: Any) -> Devices:
        number = len(list(self._folder.glob("plan*")))
        folder = self._folder / f"plan{number}"
        folder.mkdir()
        return Devices(folder, **what)

    def __call__(
        self,
        tasks: Sequence[Task],
        devices: Devices,
        budget: float | None = None,
        cards: tuple[Card, ...] = CARDS,
    ) -> list[Tuned]:
        setup = Setup(devices, FIND, self.journal, self._identity)
        with Crew(cards, setup, budget) as found:
            done = list(sessions.tune_together(tasks, found, self._choices, self.profile))
        assert found.finished == len(tasks) and not found.running
        assert not multiprocessing.active_children()
        return sorted(done, key=lambda tuned: tuned.index)

    def lines(self) -> list[dict[str, Any]]:
        """The journal, which has no line that is torn."""
        return [json.loads(line) for line in self.journal.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, identity: Identity, choices: Choices) -> Runner:
    return Runner(tmp_path, identity, choices)


def decisions(found: Sequence[Tuned]) -> list[Decision]:
    return [tuned.decision for tuned in found]


# ---------------------------------------------------------------- results


def test_two_cards_share_tasks_and_decide_what_one_does(
    tasks: Sequence[Task], whole: Whole, run: Runner
) -> None:
    devices = run.plan(together=2)
    found = run(tasks, devices)
    expected, measured, profile, journal = whole
    assert decisions(found) == expected
    assert [tuned.index for tuned in found] == list(range(len(tasks)))
    assert {tuned.device for tuned in found} == {0, 1}
    assert sum(tuned.measured for tuned in found) == measured == len(run.lines())
    assert run.profile.read_bytes() == profile.read_bytes()
    records = [{r["key"]: r for r in map(json.loads, p.read_text().splitlines())}
               for p in (run.journal, journal)]  # fmt: skip
    assert records[0] == records[1]
    # Each task on the card that says so, and there alone.
    for card, lines in devices.measured().items():
        mine = {tuned.decision.task.name for tuned in found if tuned.device == card}
        assert {line.partition(": ")[0] for line in lines} == mine
    # Cards make no difference to who runs next: another run measures nothing.
    again = run(tasks, run.plan())
    assert [tuned.decision.tried for tuned in again] == [d.tried for d in expected]
    assert sum(tuned.measured for tuned in again) == 0


def test_one_card_may_be_another_than_the_first(tasks: Sequence[Task], run: Runner) -> None:
    found = run(tasks[-1:], run.plan(), cards=CARDS[1:])
    assert [tuned.device for tuned in found] == [1] and found[0].decision.tried > 0


def test_there_may_be_fewer_tasks_than_cards(tasks: Sequence[Task], run: Runner) -> None:
    devices = run.plan()
    run(tasks[-1:], devices)
    assert list(devices.measured()) == [0]
    assert run((), run.plan()) == []


@pytest.mark.parametrize("preset", ["demo-dflash", "demo-dflash2"])
def test_no_two_tasks_have_a_kernel_in_common(preset: str) -> None:
    """So no two workers compile the same."""
    owners: dict[object, str] = {}
    for task in find(preset)():
        held = task.incumbent(None)
        for candidate in task.space.explore(task.sizes, task.dtype, LIMITS, held):
            for call in task.calls:
                assert owners.setdefault(call.case(candidate), task.name) == task.name


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("fails", ["kill", "raise"])
def test_a_worker_that_dies_costs_nothing_but_time(
    fails: str,
    tasks: Sequence[Task],
    whole: Whole,
    run: Runner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = run(tasks, run.plan(fails=fails, at=("linear_norm", 40), together=2))
    expected, measured, _, _ = whole
    assert decisions(found) == expected
    keys = [line["key"] for line in run.lines()]
    assert len(keys) == len(set(keys)) == measured == sum(tuned.measured for tuned in found)
    said = {"kill": "its process ended with SIGKILL", "raise": "unspecified launch failure"}[fails]
    (warned,) = caplog.messages
    assert said in warned and "linear_norm O=256 I=768 bfloat16 is tried once more" in warned


def test_a_candidate_that_loses_the_device_is_noted_and_left_out(
    tasks: Sequence[Task], run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    found = run(tasks, run.plan(fails="lose", at=("linear_norm", 40)))
    (line,) = (line for line in run.lines() if line["status"] == "failed")
    assert line["message"] == "lost the device: an illegal memory access was encountered"
    assert " lost it: an illegal memory access was encountered; linear_norm " in caplog.text
    (tuned,) = (t for t in found if t.decision.task.parts[0].op == "linear_norm")
    assert (tuned.decision.result, tuned.decision.failed) == ("won", 1)


def test_a_task_that_kills_twice_has_failed_and_others_go_on(
    tasks: Sequence[Task], whole: Whole, run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    devices = run.plan(fails="kill", at=("rope_append", 0), times=99)
    found = run(tasks, devices)
    for tuned, expected in zip(found, whole[0], strict=True):
        if expected.task.parts[0].op != "rope_append":
            assert tuned.decision == expected
            continue
        assert (tuned.decision.result, tuned.measured) == ("failed", 0)
        assert tuned.decision.chosen == tuned.decision.incumbent
        assert tuned.document()["message"] == "its process ended with SIGKILL"
        text = decisions_text([tuned.decision])
        assert ": failed\n  its process ended with SIGKILL\n  0 candidates tried" in text
    assert len(list(devices.folder.glob("happened*"))) == 2
    assert caplog.messages[-1].endswith(" has failed")


def test_a_card_that_cannot_start_is_left_out(
    tasks: Sequence[Task], run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    found = run(tasks[-2:], run.plan(unfit=(0,), together=2, seconds=0.1))
    assert {tuned.device for tuned in found} == {1}
    assert "device 0: RuntimeError: CUDA error: device not ready" in caplog.messages
    with pytest.raises(TuningError, match=r"expected one that measures.*device not ready; .*jsonl"):
        run(tasks, run.plan(unfit=(0, 1)))
    assert not multiprocessing.active_children()


def test_cards_on_which_every_worker_dies_end_the_run(tasks: Sequence[Task], run: Runner) -> None:
    many = [task for task in tasks if task.parts[0].op == "rms_norm"] * 4
    assert len(many) >= 4
    devices = run.plan(fails="kill", at=("rms_norm", 0), times=99)
    with pytest.raises(TuningError, match="got none: device 0: its process ended with SIGKILL"):
        run(many, devices, cards=CARDS[:1])
    assert len(list(devices.folder.glob("happened*"))) == crew._DEATHS


def test_what_a_caller_must_mend_ends_the_run(tasks: Sequence[Task], run: Runner) -> None:
    with pytest.raises(DeviceMemoryError, match="expected room"):
        run(tasks, run.plan(fails="memory", at=("linear_norm", 0)))
    assert not multiprocessing.active_children()


# ---------------------------------------------------------------- interrupts, budget


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_loses_nothing_and_goes_on(
    number: int, tasks: Sequence[Task], whole: Whole, run: Runner
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    # Python leaves it ignored in a process that was started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    devices = run.plan(
        together=2, seconds=0.05, signal=number, signals=os.getpid(), at=("linear_norm", 40)
    )
    with pytest.raises(KeyboardInterrupt):
        run(tasks, devices)
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGTERM) is before
    kept = [f"{line['task']}: " for line in run.lines()]
    measured = [line for lines in devices.measured().values() for line in lines]
    assert 40 < len(kept) == len(measured) < whole[1], "what was being measured is kept too"
    found = run(tasks, run.plan())
    assert decisions(found) == whole[0]
    assert sum(tuned.measured for tuned in found) == whole[1] - len(kept)


def test_no_measurement_begins_after_the_budget(
    tasks: Sequence[Task], whole: Whole, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = run.plan()
    found = run(tasks, devices, budget=1e-6)
    assert {tuned.decision.result for tuned in found} == {"unfinished"}
    assert devices.measured() == {} and sum(tuned.measured for tuned in found) == 0
    # Within each task it ends after the measurement in which it passes.
    monkeypatch.setattr(Crew, "left", property(lambda self: 0.2))
    found = run(tasks, run.plan(seconds=0.25), budget=1.0)
    assert {tuned.decision.result for tuned in found} == {"unfinished"}
    assert all(tuned.measured <= 6 for tuned in found)


def test_a_worker_ends_when_nobody_is_there_any_more(
    tasks: Sequence[Task], run: Runner, identity: Identity
) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    devices = run.plan(seconds=0.05)
    setup = Setup(devices, FIND, run.journal, identity)
    process = context.Process(target=worker.work, args=(there, CARDS[0], setup), daemon=True)
    process.start()
    there.close()
    assert isinstance(here.recv(), Ready)
    task = next(task for task in tasks if task.parts[0].op == "linear_norm")
    here.send(Job(task.name, task.incumbent(None), None))
    assert isinstance(here.recv(), Progress)
    here.close()
    process.join(60)
    assert process.exitcode == 0
    (measured,) = devices.measured().values()
    assert 0 < len(measured) == len(run.lines())


# ---------------------------------------------------------------- journal


def test_a_journal_has_several_writers(tmp_path: Path) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    path = tmp_path / "journal.jsonl"
    writers = [context.Process(target=append, args=(path, n, 25), daemon=True) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["key"] for line in lines} == {f"{w} {n}" for w in range(3) for n in range(25)}
    assert len(lines) == len(Journal(path)) == 75
