"""A few hundred rounds of coming and going leave nothing behind; `benchmarks/soak.py` runs many
more.

What is alive in the middle of a soak follows from its schedule: requests, held contexts and the
prefix cache make a few hundred objects, more or less. So objects are counted when everything has
ended and the prefix cache is empty.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.scheduler import Scheduler

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"

#: Objects that may be left: some of the test's own. One for each request would be more.
LEFT = 10


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


def soaked(
    script: ModuleType, engine: dg.Engine, rounds: int, seed: int
) -> tuple[Any, Counter[str]]:
    """What a soak did, and what it left behind: how many objects of each type.

    A shorter soak goes first, so that caches which fill once are full. Then whatever exists is
    frozen: the collector neither looks at it nor lists it, whichever tests it comes from.
    """
    warm = script.soak(engine, 40, seed)
    forget_prefixes(engine)
    gc.collect()
    gc.freeze()
    try:
        result = script.soak(engine, rounds, seed + 1)
        assert sum(result.ended.values()) == warm.requests + result.requests
        assert engine.scheduler.prefixes.nbytes <= engine.scheduler.prefixes.capacity
        forget_prefixes(engine)
        gc.collect()
        return result, Counter(str(type(found)) for found in gc.get_objects())
    finally:
        gc.unfreeze()


def forget_prefixes(engine: dg.Engine) -> None:
    prefixes = engine.scheduler.prefixes
    prefixes.drop(list(prefixes._stored))
    assert len(prefixes) == prefixes.nbytes == 0


@pytest.mark.slow
def test_nothing_is_left_behind(shop: Any, script: ModuleType, rng: torch.Generator) -> None:
    engine = script.load("dflash2")
    seed = int(torch.randint(2**31, (), generator=rng))
    result, left = soaked(script, engine, 150, seed)
    assert result.rounds >= 150 and result.requests > 20 and result.forks > 2
    assert shop.is_at_rest(engine)
    assert left.total() < LEFT, f"{left.total()} objects (seed {seed}): {left.most_common()}"
    engine.close()


@pytest.mark.slow
def test_one_object_of_each_request_would_be_seen(
    script: ModuleType, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, leak = Scheduler.end, []

    def leaking(self: Scheduler, request: dg.Request, *arguments: Any, **more: Any) -> Any:
        leak.append([request.frontier])
        return end(self, request, *arguments, **more)

    monkeypatch.setattr(Scheduler, "end", leaking)
    engine = script.load("dflash2")
    result, left = soaked(script, engine, 60, int(torch.randint(2**31, (), generator=rng)))
    assert left.total() >= result.requests > LEFT
    engine.close()
