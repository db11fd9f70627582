"""The program as a function, one thread for torch, and a folder where the examples' paths exist."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the names that examples use."""
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
