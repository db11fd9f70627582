"""A store of the test's own: no test reads or writes the user's profiles."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph import profile_store
from dflash_graph.autotune import crew
from dflash_graph.choices import Entry
from dflash_graph.profile_store import Identity, template_hash

DEVICE = "A Device 1"
VERSIONS = {"driver": "1.0", "cuda": "13.0", "torch": "2.13", "triton": "3.9", "package": "0.1.0"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder; not made yet."""
    found = tmp_path / "profiles"
    monkeypatch.setenv(profile_store.VARIABLE, str(found))
    monkeypatch.setattr(profile_store, "_said", set())
    return found


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests hand to workers is imported there by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.fixture
def quick_starts(importable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from a process that has imported what they need and runs nothing."""
    monkeypatch.setattr(crew, "_START", "forkserver")
    multiprocessing.set_forkserver_preload(["dflash_graph.autotune.worker"])


@pytest.fixture
def identity() -> Identity:
    return Identity(DEVICE, 90, VERSIONS)


@pytest.fixture
def entry() -> Callable[..., Entry]:
    """An entry of a product that is valid here: `entry(O=64, num_warps=8)`."""

    def make(*, outputs: int = 64, inputs: int = 32, **changes: Any) -> Entry:
        values: dict[str, Any] = {
            "op": "linear",
            "dtype": "bfloat16",
            "sizes": {"O": outputs, "I": inputs},
            "tiles": {"BLOCK_O": 64, "BLOCK_I": 32, "SPLIT": 1, "TRIGGER": 1},
            "num_warps": 4,
            "num_stages": {16: 3, 32: 3},
            "template": template_hash("linear"),
            "versions": VERSIONS,
        }
        return Entry(**{**values, **changes})

    return make
