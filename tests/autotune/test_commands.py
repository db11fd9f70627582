"""The commands of `autotune`: text, JSON, bad arguments, missing and damaged files, no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

# Imported before a test replaces what they import.
from dflash_graph.autotune import cards as cards_module
from dflash_graph.autotune import device as device_module
from dflash_graph.autotune import report as report_module
from dflash_graph.autotune.cards import Card
from dflash_graph.autotune.crew import Running
from dflash_graph.choices import Entry, shipped_choices
from dflash_graph.cli import PROGRAM, app, autotune_progress
from dflash_graph.profile_store import Identity, file_name, lookup, read_profile, save, user_file

from . import worker_devices
from .fake_device import FakeDevice

MakeEntry = Callable[..., Entry]
COMMANDS = ("run", "status", "show", "diff", "merge", "prune", "export")
H200 = "NVIDIA H200"


def cli(*arguments: object, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "80", **env}).invoke(
        app, ["autotune", *map(str, arguments)], prog_name=PROGRAM
    )


def ok(*arguments: object, **env: str) -> str:
    done = cli(*arguments, **env)
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return str(done.stdout)


def error(*arguments: object) -> str:
    done = cli(*arguments)
    assert (done.exit_code, done.stdout) == (1, ""), done.output
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return str(done.stderr)


@pytest.fixture
def stored(identity: Identity, entry: MakeEntry) -> Path:
    """The user's profile of a device, with an entry that is used and one that is not."""
    path = user_file(identity.device, identity.capability)
    old = entry(outputs=128, template="0123456789abcdef")
    save(path, identity, [entry(versions={}), old])
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", ["40", "80"])
def test_help_ends_with_examples(command: str, columns: str) -> None:
    text = ok(command, "--help", COLUMNS=columns)
    last = text.rstrip().splitlines()[-1].strip()
    assert last.startswith("dflash-graph autotune ") or "Examples:" in text
    assert text.startswith(f"Usage: dflash-graph autotune {command}")


def test_help_lists_the_commands() -> None:
    text = ok("--help")
    assert all(f"\n  {command} " in text for command in COMMANDS)


# ---------------------------------------------------------------- reading


def test_status_says_what_there_is(stored: Path, folder: Path) -> None:
    text = ok("status")
    assert f"folder  {folder}" in text
    assert f"user: {stored}\n  A Device 1, sm_90\n  2 entries, 1 used\n" in text
    assert "shipped: nvidia-h200.json" in text
    report = json.loads(ok("status", "--json"))
    assert [p["layer"] for p in report["profiles"]][:1] == ["user"]
    assert report["versions"]["torch"] and report["journals"] == []


def test_status_of_a_damaged_file_says_so(stored: Path) -> None:
    stored.write_text("{")
    assert f"user: {stored}\n  not read: {stored}: expected a profile" in ok("status")


def test_status_of_a_geometry_names_each_source() -> None:
    arguments = ("status", "--geometry", "qwen3.5-27b-dflash2", "--device", H200.lower())
    done = cli(*arguments, "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    sources = {row["op"]: row["source"] for row in report["tasks"]}
    assert sources["swiglu_linear"] == "nvidia-h200.json"
    assert sources["rms_norm"] == "default"
    text = cli(*arguments).stdout
    assert "\nswiglu_linear bfloat16 ffn_width=17408 I=5120\n  5 launches a round" in text
    assert "  from nvidia-h200.json\n" in text and "  from default\n" in text


def test_status_of_a_device_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    said = error("status", "--geometry", "demo-dflash", "--device", "Z")
    assert f"expected one that there are profiles of ('{H200}'), got 'Z'" in said


def test_show_says_what_is_used_and_what_differs(stored: Path) -> None:
    text = ok("show", stored)
    assert text.startswith(f"explicit: {stored}\n  A Device 1, sm_90\n")
    assert "  linear bfloat16 O=64 I=32\n    BLOCK_O=64 BLOCK_I=32 SPLIT=1 TRIGGER=1\n" in text
    assert "    template: measured with 0123456789abcdef, here " in text
    assert text.count("    used\n") == 1 and text.count("    not used\n") == 1
    (report,) = json.loads(ok("show", stored, "--json"))["profiles"]
    used = {entry["sizes"]["O"]: entry["used"] for entry in report["entries"]}
    assert used == {64: True, 128: False}


def test_show_of_what_ships_says_which_templates_are_not_known() -> None:
    text = ok("show", "nvidia-h200.json")
    (shipped,) = (c for c in shipped_choices() if c.device == H200)
    unknown = sum(entry.template is None for entry in shipped.entries)
    assert 0 < unknown == text.count("used; which template was measured is unknown")
    assert "torch: measured with " in text


def test_show_lists_all_or_one_device(stored: Path) -> None:
    both = json.loads(ok("show", "--json"))["profiles"]
    assert [p["device"] for p in both] == ["A Device 1", H200]
    (one,) = json.loads(ok("show", "--device", "a device 1", "--json"))["profiles"]
    assert one["source"] == str(stored)


@pytest.mark.parametrize(
    "arguments",
    [("show", "no.json"), ("diff", "no.json", "nvidia-h200.json"), ("prune", "no.json")],
)
def test_a_missing_file_is_one_line(arguments: tuple[str, ...]) -> None:
    assert "no.json: expected a" in error(*arguments)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff{")
    assert "a.json: expected a profile of choices, got bytes" in error("show", path)


def test_diff_names_fields(identity: Identity, entry: MakeEntry, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    save(old, identity, [entry(), entry(outputs=1)])
    tiles = {**entry().tiles, "BLOCK_O": 128}
    save(new, identity, [entry(tiles=tiles, num_warps=8), entry(outputs=2)], pdl=True)
    text = ok("diff", old, new)
    assert text == (
        "pdl: False -> True\n"
        "+ linear bfloat16 O=2 I=32\n"
        "- linear bfloat16 O=1 I=32\n"
        "~ linear bfloat16 I=32 O=64\n"
        "    tiles.BLOCK_O: 64 -> 128\n"
        "    num_warps: 4 -> 8\n"
        "    pdl: False -> True\n"
    )
    report = json.loads(ok("diff", old, new, "--json"))
    assert report["profile"] == {"pdl": [False, True]}
    assert report["changed"][0]["fields"]["num_warps"] == [4, 8]
    assert ok("diff", old, old) == "no difference\n"


# ---------------------------------------------------------------- writing


def test_merge_keeps_the_last_of_a_key(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    first, second, into = (tmp_path / f"{n}.json" for n in ("first", "second", "into"))
    save(first, identity, [entry(num_warps=1), entry(outputs=1)], pdl=True)
    save(second, identity, [entry(num_warps=2)])
    save(into, identity, [entry(num_warps=8), entry(outputs=3)])
    report = json.loads(ok("merge", into, first, second, "--json"))
    assert report["added"] == ["linear bfloat16 I=32 O=1"]
    assert report["replaced"] == ["linear bfloat16 I=32 O=64"]
    found = {e.sizes["O"]: e for e in read_profile(into).entries}
    assert {size: e.num_warps for size, e in found.items()} == {1: 4, 3: 4, 64: 2}
    # What a file says of all its kernels goes with its entries.
    assert found[1].pdl is True and not read_profile(into).pdl
    assert "0 added, 0 replaced" in ok("merge", into, second)


def test_merge_refuses_another_device(stored: Path, tmp_path: Path) -> None:
    said = error("merge", tmp_path / "into.json", stored, "nvidia-h200.json")
    assert "nvidia-h200.json: expected a profile of device name A Device 1, got NVIDIA H200" in said
    assert not (tmp_path / "into.json").exists()


def test_prune_removes_what_is_not_used(stored: Path) -> None:
    before = stored.read_bytes()
    text = ok("prune", "--dry-run")
    assert "- linear bfloat16 I=32 O=128\n    template: measured with 0123456789abcdef" in text
    assert text.endswith("1 entries would be removed\n") and stored.read_bytes() == before
    report = json.loads(ok("prune", stored, "--json"))
    assert [found["entry"] for found in report["removed"]] == ["linear bfloat16 I=32 O=128"]
    assert [e.sizes["O"] for e in read_profile(stored).entries] == [64]
    assert ok("prune") == "0 entries removed\n"


def test_prune_of_versions_removes_what_others_measured(
    identity: Identity, entry: MakeEntry, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    save(path, identity, [entry(versions={"torch": "0.0"}), entry(outputs=1, versions={})])
    assert ok("prune", path) == "0 entries removed\n"
    assert "torch: measured with 0.0" in ok("prune", path, "--versions")
    assert [e.sizes["O"] for e in read_profile(path).entries] == [1]


def test_export_is_what_a_device_runs_with(
    stored: Path, identity: Identity, tmp_path: Path
) -> None:
    path = tmp_path / "export.json"
    done = cli("export", path, "--device", "A Device 1")
    assert done.exit_code == 0 and "1 entries of A Device 1" in done.stdout
    assert read_profile(path).entries == lookup(identity).entries
    done = cli("export", "-", "--device", "A Device 1")
    assert done.stdout == path.read_text()
    assert "absent/x.json: expected to write a profile" in error_after_warnings(
        "export", tmp_path / "absent" / "x.json", "--device", "A Device 1"
    )


def error_after_warnings(*arguments: object) -> str:
    done = cli(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    return line


# ---------------------------------------------------------------- run


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_run_needs_a_gpu(no_gpu: None, folder: Path) -> None:
    said = error("run", "--geometry", "demo-dflash2")
    assert "autotune run: expected a CUDA device to measure on, got none" in said
    assert not folder.exists()


def test_run_lists_without_one(no_gpu: None) -> None:
    text = ok("run", "--geometry", "demo-dflash2", "--list", "--op", "linear_norm")
    assert text == (
        "linear_norm O=256 I=768 bfloat16\n  1 launch a round, 512.50 KiB, row tiles 16 32 64\n"
    )
    report = json.loads(ok("run", "--geometry", "demo-dflash2", "--list", "--json"))
    assert [t["bytes"] for t in report["tasks"]] == sorted(
        (t["bytes"] for t in report["tasks"]), reverse=True
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "give either --geometry or --target"),
        (("--geometry", "demo-dflash", "--budget", "soon"), 2, "expected a time such as 600s"),
        (("--geometry", "demo-dflash", "--budget", "0s"), 2, "expected a time such as 600s"),
        (("--geometry", "demo-dflash", "--max-batch", "9"), 2, "Invalid value for '--max-batch'"),
        (("--geometry", "none"), 1, "preset: expected one of"),
        (("--geometry", "demo-dflash", "--op", "no_op", "--list"), 1, "op: expected one of"),
        (("--target", "nowhere", "--list"), 1, "nowhere"),
        (
            ("--geometry", "demo-dflash", "--devices", "one"),
            1,
            "devices: expected indices of CUDA devices with commas between, such as 0,1, got 'one'",
        ),
        (
            ("--geometry", "demo-dflash", "--devices", "0,1,0", "--list"),
            1,
            "devices: expected each device once, got 0 more than once in '0,1,0'",
        ),
    ],
)
def test_run_refuses(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = cli("run", *arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in " ".join(done.stderr.replace("│", " ").split())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, identity: Identity) -> FakeDevice:
    """A device that is a formula, in the place of the machine's."""
    fake = FakeDevice()
    monkeypatch.setattr("dflash_graph.profile_store.device_identity", lambda: identity)
    monkeypatch.setattr(report_module, "device_identity", lambda: identity)
    monkeypatch.setattr(device_module, "CudaMeasurer", lambda context: fake)
    return fake


RUN = ("run", "--geometry", "demo-dflash2", "--op", "linear_norm")


def test_run_tunes_stores_and_goes_on(device: FakeDevice, identity: Identity) -> None:
    done = cli(*RUN)
    assert done.exit_code == 0, done.output
    path = user_file(identity.device, identity.capability)
    assert done.stdout.startswith("linear_norm O=256 I=768 bfloat16: won\n")
    assert "margin" in done.stdout and f"1 choices stored in {path}" in done.stdout
    assert "1 of 1  linear_norm O=256 I=768 bfloat16: 0 of " in done.stderr
    (entry,) = read_profile(path).entries
    assert entry.op == "linear_norm" and entry.num_warps == 8
    asked = len(device.asked)
    report = json.loads(cli(*RUN, "--json").stdout)
    assert report["profile"] == str(path)
    assert report["tasks"][0]["result"] == "kept", "what was stored is what runs now"
    again = json.loads(cli(*RUN, "--json").stdout)
    assert again["measured"] == 0 and len(device.asked) >= asked
    assert "us, before" in ok("show", path) and "measurements" in ok("status")


def test_run_is_interrupted_and_goes_on(device: FakeDevice, identity: Identity) -> None:
    device.interrupt_after = 13
    done = cli(*RUN)
    assert done.exit_code == 130 and done.stderr.splitlines()[-1] == "error: interrupted"
    device.interrupt_after = None
    before = len(device.asked)
    report = json.loads(cli(*RUN, "--json").stdout)
    assert report["tasks"][0]["result"] == "won"
    assert 0 < before - 12 + report["measured"] < report["tasks"][0]["tried"]


def test_run_ends_with_its_budget(device: FakeDevice) -> None:
    done = cli(*RUN, "--budget", "0.000001s")
    assert done.exit_code == 0
    assert ": unfinished\n" in done.stdout and "the same command goes on from here" in done.stdout
    assert device.asked == []


def test_run_stores_where_it_is_told(device: FakeDevice, tmp_path: Path, folder: Path) -> None:
    path, journal = tmp_path / "mine.json", tmp_path / "mine.jsonl"
    assert cli(*RUN, "--profile", path, "--journal", journal).exit_code == 0
    assert len(read_profile(path).entries) == 1 and journal.exists()
    assert not folder.exists()


# ---------------------------------------------------------------- run on several devices

SHARED = ("run", "--geometry", "demo-dflash2", "--op", "rms_norm", "--op", "rope_append")


@pytest.fixture
def cards(importable: None, monkeypatch: pytest.MonkeyPatch, identity: Identity) -> None:
    """A machine with two devices that are formulas."""
    found = (Card(0, "0", "GPU-0"), Card(1, "1", "GPU-1"))
    monkeypatch.setattr("dflash_graph.profile_store.device_identity", lambda: identity)
    monkeypatch.setattr(cards_module, "find_cards", lambda indices: (found, identity))
    monkeypatch.setattr(device_module, "measurer_on", worker_devices.measurer_on)
    monkeypatch.setattr(device_module, "CudaMeasurer", lambda context: FakeDevice(0.01))


def test_devices_share_a_run(cards: None, identity: Identity, tmp_path: Path) -> None:
    """With processes that are started as they are for devices that are real."""
    one = json.loads(cli(*SHARED, "--json", "--profile", tmp_path / "p", "--journal",
                         tmp_path / "j").stdout)  # fmt: skip
    done = cli(*SHARED, "--devices", "0,1", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["devices"] == [0, 1] and "devices" not in one
    assert {task["device_index"] for task in report["tasks"]} <= {0, 1}
    assert report["measured"] == sum(task["measured"] for task in report["tasks"])
    assert report["measured"] == one["measured"] > 0
    for task, alone in zip(report["tasks"], one["tasks"], strict=True):
        assert {name: task[name] for name in alone} == alone
    assert read_profile(report["profile"]).entries == tuple(
        dataclasses.replace(entry, source=report["profile"])
        for entry in read_profile(tmp_path / "p").entries
    )
    begun = [line for line in done.stderr.splitlines() if ": 0 of " in line]
    assert len(begun) == len(report["tasks"])
    assert begun[0].startswith("0 of 2 tasks; device ") and begun[0].endswith(" candidates")


def test_devices_share_a_run_for_people(cards: None, quick_starts: None) -> None:
    done = cli(*SHARED, "--devices", "0,1")
    assert done.exit_code == 0, done.output
    names = [line.split(" ")[0] for line in done.stdout.splitlines() if line.endswith(": won")]
    listed = json.loads(ok(*SHARED, "--list", "--json"))["tasks"]
    assert names == [task["task"].split(" ")[0] for task in listed], "in the order of tasks"
    assert " measurements made; 2 choices stored in " in done.stdout
    done = cli(*SHARED, "--devices", "0,1", "--budget", "0.000001s")
    assert done.exit_code == 0 and "\n0 measurements made" in done.stdout
    assert "the budget ended: the same command goes on from here" in done.stdout


def test_a_run_with_tasks_that_failed_says_so(
    cards: None, quick_starts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "measurer_on", worker_devices.killer_on)
    done = cli(*SHARED, "--devices", "0,1", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert {task["result"] for task in report["tasks"]} == {"failed"}
    assert report["measured"] == 0
    assert done.stderr.splitlines()[-1] == (
        "error: autotune run: expected 2 tasks to be decided, got 2 that failed; the same command "
        "tries them again"
    )
    for task in report["tasks"]:
        assert task["message"] == "its process ended with SIGKILL"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_all_devices(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    crew = SimpleNamespace(running={}, finished=0, left=float("inf"), progress=None)
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("time.monotonic", lambda: now.seconds)
    if terminal:
        status = SimpleNamespace(update=said.append)
        console = SimpleNamespace(status=lambda text: contextlib.nullcontext(status))
        monkeypatch.setattr("rich.console.Console", lambda stderr: console)
    else:
        monkeypatch.setattr("typer.echo", lambda line, err: said.append(line))
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: terminal))
    with autotune_progress.shared_progress(crew, 4):
        crew.running[1] = Running("linear O=1", 0, 40)
        crew.progress(1)
        crew.running[0] = Running("rms_norm H=2", 0, 20)
        crew.progress(0)
        crew.finished, crew.running[0] = 1, Running("rms_norm H=2", 10, 20)
        now.seconds += 30
        crew.progress(0)
        now.seconds += 1
        crew.progress(0)
        crew.left = 20.0
        crew.running[0] = Running("rms_norm H=3", 0, 20)
        crew.progress(0)
        crew.finished = 4
        crew.running.clear()
        crew.progress(0)
    if terminal:
        assert said[0] == "0 of 4 tasks\n  device 1  linear O=1: 0 of 40"
        assert said[2] == (
            "1 of 4 tasks, 50 s left\n  device 0  rms_norm H=2: 10 of 20\n"
            "  device 1  linear O=1: 0 of 40"
        )
        assert said[4].startswith("1 of 4 tasks, 20 s left\n  device 0  rms_norm H=3")
        assert said[5] == "4 of 4 tasks, 0 s left"
    else:
        assert said == [
            "0 of 4 tasks; device 1  linear O=1: 0 of 40 candidates",
            "0 of 4 tasks; device 0  rms_norm H=2: 0 of 20 candidates",
            "1 of 4 tasks, 50 s left; device 0  rms_norm H=2: 10 of 20 candidates",
            "1 of 4 tasks, 20 s left; device 0  rms_norm H=3: 0 of 20 candidates",
        ]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_real_devices_share_a_run(tmp_path: Path) -> None:
    arguments = ("run", "--geometry", "demo-dflash2", "--op", "rms_norm", "--devices", "0,1")
    done = cli(*arguments, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["devices"] == [0, 1] and report["measured"] > 0
    assert report["measured"] == sum(task["measured"] for task in report["tasks"])
    assert len(Path(report["journal"]).read_text().splitlines()) == report["measured"]
    for task in report["tasks"]:
        assert task["result"] in ("won", "kept", "not resolved"), task
        assert task["device_index"] in (0, 1) and task["failed"] == 0
    # Winners run now, so no more than launches of theirs is new.
    again = json.loads(cli(*arguments, "--json").stdout)
    assert again["measured"] < report["measured"]


# ---------------------------------------------------------------- installed


@pytest.mark.parametrize("arguments", [("status", "--json"), ("show",), ("prune",)])
def test_the_installed_program_runs_without_a_terminal(
    arguments: tuple[str, ...], stored: Path
) -> None:
    script = Path(sys.executable).parent / PROGRAM
    done = subprocess.run(
        [str(script), "autotune", *arguments],
        env=os.environ | {"COLUMNS": "30", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and done.stdout
    if arguments == ("status", "--json"):
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["profiles"][0]["source"].endswith(file_name("A Device 1", 90))


def test_looking_up_needs_no_tuner() -> None:
    """An engine looks up; nothing that it imports can measure."""
    script = (
        "import sys, dflash_graph.rounds, dflash_graph.engine\n"
        "print([name for name in sys.modules if name.startswith('dflash_graph.autotune')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
