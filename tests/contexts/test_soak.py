"""A few hundred rounds of coming and going at flat memory; `benchmarks/soak.py` runs many more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"

#: Objects that there may be more at the end than at the beginning: caches that fill once. One round
#: or request that is never forgotten would leave more.
GROWTH = 100


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_flat_memory(shop: Any, script: ModuleType, rng: torch.Generator) -> None:
    engine = script.load("dflash2")
    seed = int(torch.randint(2**31, (), generator=rng))
    result = script.soak(engine, 150, seed)
    assert result.rounds >= 150 and result.requests > 20 and result.forks > 2
    assert sum(result.ended.values()) == result.requests
    assert shop.is_at_rest(engine)
    assert engine.scheduler.prefixes.nbytes <= engine.scheduler.prefixes.capacity
    first, last = script.ends(result.objects)
    assert last - first < GROWTH, f"{last - first} more objects (seed {seed})"
    engine.close()
