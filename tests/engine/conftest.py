"""Engines over the golden pairs, and plain decoding to compare them with."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dflash_graph as dg
from dflash_graph.testing import INTEGER_POISON

GOLDEN = Path(__file__).parents[1] / "golden"

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One golden end-to-end case: its models, its prompts and their plain greedy output."""

    name: str
    target: Path
    draft: Path
    prompts: tuple[Ids, ...]
    greedy: tuple[Ids, ...]
    runs: tuple[dict[str, Any], ...]
    vocab: int

    def cut(self, index: int, count: int) -> tuple[Ids, Ids]:
        """Prompt `index` with `count` tokens of its output, and the rest of the output."""
        return self.prompts[index] + self.greedy[index][:count], self.greedy[index][count:]


class Lab:
    """Golden cases, engines over them, and a cache of what plain decoding of one request gives."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}
        self._plain: dict[Path, dg.Engine] = {}
        self._texts: dict[tuple[Path, Ids], Ids] = {}

    def case(self, name: str) -> Case:
        if name not in self._cases:
            folder = GOLDEN / f"e2e_{name}"
            expected = json.loads((folder / "expected.json").read_text())
            tensors = load_file(folder / "expected.safetensors")
            target = GOLDEN / expected["target"]
            prompts = range(expected["prompts"])
            self._cases[name] = Case(
                name,
                target,
                GOLDEN / expected["draft"],
                tuple(tuple(tensors[f"prompt{p}.ids"].tolist()) for p in prompts),
                tuple(tuple(tensors[f"prompt{p}.greedy_ids"].tolist()) for p in prompts),
                tuple(expected["runs"]),
                json.loads((target / "config.json").read_text())["vocab_size"],
            )
        return self._cases[name]

    def load(self, name: str, **options: Any) -> dg.Engine:
        """An engine over a case whose every byte that is not yet written is poison."""
        case = self.case(name)
        options = {
            "max_context": 256,
            "max_batch": 1,
            "device": "cpu",
            "lowering": "eager",
        } | options
        engine = dg.Engine.load(case.target, case.draft, dg.EngineOptions(**options))
        poison(engine)
        return engine

    def plain(self, name: str, prompt: Sequence[int], count: int) -> Ids:
        """`count` tokens of plain decoding, alone, ids only."""
        target, key = self.case(name).target, tuple(prompt)
        known = self._texts.get((target, key), ())
        if len(known) < count:
            if target not in self._plain:
                self._plain[target] = self.load(name, speculative=False, max_context=512)
            params = dg.SamplingParams(max_new_tokens=count, ignore_eos=True)
            (result,) = self._plain[target].generate([key], params)
            assert len(result.token_ids) == count
            known = self._texts[target, key] = result.token_ids
        return known[:count]


def poison(engine: dg.Engine) -> None:
    """Fill state, arena and result frames with what no output may depend on."""
    rounds = engine.rounds
    rounds.state.storage.fill_(0xFF)
    rounds.arena.fill_(0xFF)
    for executor in (*rounds.values(), *rounds.sampling.values(), rounds.first_token):
        executor.outputs.buffer.fill_(INTEGER_POISON)


def at_rest(engine: dg.Engine) -> bool:
    """Whether nothing runs and every slot and page was given back."""
    return (
        engine.is_idle
        and engine.scheduler.slots.free == engine.scheduler.slots.count
        and engine.scheduler.pages.free == engine.scheduler.pages.count
    )


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from threads and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture
def load(lab: Lab) -> Generator[Callable[..., dg.Engine], None, None]:
    """`load(case, **options)`: a poisoned engine that must be at rest when the test is over."""
    engines: list[dg.Engine] = []

    def load(name: str, **options: Any) -> dg.Engine:
        engines.append(lab.load(name, **options))
        return engines[-1]

    yield load
    for engine in engines:
        assert at_rest(engine), "slots or pages were not given back"
        engine.close()


@pytest.fixture
def random_ids(rng: torch.Generator) -> Callable[[int, int], Ids]:
    """`random_ids(count, vocab)`: fresh ids."""

    def draw(count: int, vocab: int) -> Ids:
        return tuple(torch.randint(vocab, (count,), generator=rng).tolist())

    return draw
