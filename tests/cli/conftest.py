"""The program as a function, one thread for torch, and a folder where the examples' paths exist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from dflash_graph import demo
from dflash_graph.cli import PROGRAM, app

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]

#: What makes typer and rich style output although no terminal is there.
STYLING = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "CLICOLOR_FORCE")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads buy nothing on models this small, and cost much where other work runs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in STYLING:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def script() -> Path:
    """The console script that the environment of the tests installed."""
    return Path(sys.executable).parent / PROGRAM


@pytest.fixture
def cli() -> Cli:
    """Run the program in this process: `cli("plan", "--preset", "demo-dflash")`."""

    def run(*arguments: object, **options: object) -> Result:
        return CliRunner().invoke(
            app,
            [str(argument) for argument in arguments],
            prog_name=PROGRAM,
            **options,  # type: ignore[arg-type]
        )

    return run


@pytest.fixture(scope="session")
def measured_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of real rounds of the demo pair."""
    path = tmp_path_factory.mktemp("profiles") / "measured.json"
    sizes = ("--max-batch", "1", "--max-context", "256", "--context", "100", "--turns", "3")
    build = ("profile", "build", "--preset", "demo-dflash2", "--measure", *sizes, "-o", str(path))
    done = CliRunner().invoke(app, build, prog_name=PROGRAM)
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture(scope="session")
def rounds_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of rounds with seven drafts, as `generate --json` prints them."""
    rounds = [
        {"proposed": 7, "accepted": found, "licensed": found + 1, "committed": found + 1}
        for found in (0, 1, 2, 3, 7)
    ]
    path = tmp_path_factory.mktemp("rounds") / "rounds.json"
    path.write_text(json.dumps({"prompts": [{"rounds": rounds}]}))
    return path


@pytest.fixture
def folder(
    tmp_path: Path, measured_file: Path, rounds_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A working folder with the names that examples use, and no choices of the user's own."""
    monkeypatch.setenv("DFLASH_GRAPH_PROFILES", str(tmp_path / "choices"))
    tuned = files("dflash_graph.profiles") / "tuned" / "nvidia-h200.json"
    (tmp_path / "CHOICES").write_text(tuned.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "measured.json").symlink_to(measured_file)
    (tmp_path / "rounds.json").symlink_to(rounds_file)
    (tmp_path / "PROFILES_DIR").symlink_to(measured_file.parent)
    (tmp_path / "TARGET_DIR").symlink_to(demo.target_directory())
    (tmp_path / "DRAFT_DIR").symlink_to(demo.draft_directory("dflash2"))
    (tmp_path / "prompt.txt").write_text("import os\n")
    return tmp_path


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run a command line in a process of its own, away from the repository."""

    def run(*command: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(part) for part in command],
            cwd=tmp_path,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
