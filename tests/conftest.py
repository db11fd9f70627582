"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

# One thread a process, set before torch reads it and inherited by child processes: tests run in
# several processes, and threads that spin for each other on a busy machine cost a hundredfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

# No deadline: how fast a shared machine is says nothing about correctness.
hypothesis.settings.register_profile("dflash_graph", deadline=None, print_blob=True)
hypothesis.settings.load_profile("dflash_graph")

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dflash_graph")
    group.addoption("--seed", type=int, help="replay a run with this seed of the rng fixture")
    group.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--seed")
    config.stash[_SEED] = random.SystemRandom().randrange(2**32) if seed is None else seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"rng: --seed {config.stash[_SEED]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip gpu-marked tests where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        report.sections.append(("rng", f"replay with --seed {item.config.stash[_SEED]}"))
    return report


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator, seeded afresh every run; a failure prints the seed to replay."""
    return torch.Generator().manual_seed(request.config.stash[_SEED])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CUDA device for gpu-marked tests, else the CPU."""
    return torch.device("cuda" if request.node.get_closest_marker("gpu") else "cpu")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def needs_triton() -> None:
    """The test extra brings triton where it can be had; there, its absence is a failure."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        if sys.platform == "linux" and platform.machine() == "x86_64":
            raise
        pytest.skip("the test extra brings no triton on this platform")


@pytest.fixture
def interpret(needs_triton: None, rng: torch.Generator, tmp_path: Path) -> Callable[[Path], None]:
    """Runs a file of tests in a process of its own, where triton interprets kernels: it decides
    when it is imported.
    """

    def run(file: Path) -> None:
        command = [
            *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("--seed", str(rng.initial_seed()), "--basetemp", str(tmp_path / "tests")),
            str(file),
        ]
        # Also pytest's and xdist's own variables stay behind: the inner run is a run of its own.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env = kept | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        root = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = done.stdout.splitlines()[-1]
        assert re.fullmatch(r"\d+ passed.*", summary), summary

    return run
