"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
import random
from collections.abc import Generator

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
    """Skip gpu-marked tests where there is no CUDA device: the one skip that the suite has."""
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
