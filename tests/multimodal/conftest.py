"""The public model as an oracle of multimodal prompts, and probed engines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

import dflash_graph as dg
from dflash_graph.executors import Executor

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = GOLDEN / "target_dense_2x"

Ids = tuple[int, ...]


@dataclass
class Scene:
    """A multimodal prompt."""

    ids: Ids
    rows: dict[int, Tensor]
    positions: Tensor

    def submit(self, engine: dg.Engine, params: dg.SamplingParams, **more: Any) -> dg.Request:
        return engine.submit(
            self.ids, params, embeddings=self.rows, positions=self.positions, **more
        )

    def generate(self, engine: dg.Engine, params: dg.SamplingParams) -> dg.Generation:
        request = self.submit(engine, params)
        while not request.is_finished:
            engine.step()
        return engine.result(request)


def scene(generator: torch.Generator, *parts: int | tuple[int, int, int]) -> Scene:
    """Text of a length, or an image of (frames, rows, columns), one after another."""
    ids: list[int] = []
    rows: dict[int, Tensor] = {}
    axes: list[Tensor] = []
    start = 0
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(150, (part,), generator=generator).tolist()
            axes.append((start + torch.arange(part)).expand(3, part))
            start += part
            continue
        grid = torch.cartesian_prod(*(torch.arange(n) for n in part)).reshape(-1, 3)
        for row in torch.randn(len(grid), 64, generator=generator):
            rows[len(ids)] = row
            ids.append(150)
        axes.append(start + grid.t())
        start += max(part)
    return Scene(tuple(ids), rows, torch.cat(axes, 1))


@dataclass
class Answer:
    """What the oracle computes of a scene."""

    ids: Ids
    logits: Tensor  # [T, V] of the prompt
    blocks: list[Tensor]  # [T, H] after each block of the prompt


class Oracle:
    def __init__(self) -> None:
        self._model = Qwen3_5ForCausalLM.from_pretrained(
            TARGET, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self._known: dict[tuple[Ids, int], Answer] = {}
        self.embedding = self._model.model.embed_tokens.weight.detach()

    @torch.no_grad()
    def answer(self, given: Scene, count: int) -> Answer:
        """Greedy tokens, each from the whole sequence anew; none of them is a near tie."""
        if (given.ids, count) in self._known:
            return self._known[given.ids, count]
        embeds = self.embedding[list(given.ids)].clone()
        for index, row in given.rows.items():
            embeds[index] = row
        positions, ids = given.positions, list[int]()
        first: Any = None
        for _ in range(count):
            out = self._model(
                inputs_embeds=embeds[None],
                position_ids=positions[:, None],
                use_cache=False,
                output_hidden_states=True,
            )
            first = first or out
            best = out.logits[0, -1].topk(2)
            assert float(best.values[0] - best.values[1]) > 2e-3, "choose another seed: a near tie"
            ids.append(int(best.indices[0]))
            embeds = torch.cat((embeds, self.embedding[ids[-1:]]))
            positions = torch.cat((positions, positions.max() + torch.ones(3, 1, dtype=int)), 1)
        blocks = [hidden[0] for hidden in first.hidden_states[1:]]
        known = self._known[given.ids, count] = Answer(tuple(ids), first.logits[0], blocks)
        return known


@dataclass
class Recorder:
    """Stored values of every executor that ran, by name, in order."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)
    inputs: list[dict[str, Tensor]] = field(default_factory=list)

    def columns(self, name: str, live: int) -> Tensor:
        """`[T, ...]` of prefill's chunks of `live` live tokens at most, one after another."""
        return torch.cat([value[0] for value in self.values[name]])[:live]


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records what prefill executors read and store from here on."""
    made = Recorder()
    run = Executor.run

    def recording(self: Executor, index: int = 0, probe: Any = None) -> None:
        if self.compiled.graphs[0].key.segment != "prefill":
            return run(self, index, probe)
        live = int(self.inputs["live_columns"][0])
        made.inputs.append({n: self.inputs[n].clone() for n in self.compiled.inputs.fields})

        def keep(_: object, values: Mapping[str, Tensor]) -> None:
            for name, value in values.items():
                axis = 2 if "rotary" in name else 1
                if value.dim() > axis and value.shape[axis] >= live:
                    made.values.setdefault(name, []).append(value[:, :live].clone())

        return run(self, index, keep)

    monkeypatch.setattr(Executor, "run", recording)
    return made


@pytest.fixture
def load() -> Generator[Callable[..., dg.Engine], None, None]:
    """`load(draft, **options)`: a poisoned engine that must be at rest when the test is over."""
    engines: list[dg.Engine] = []

    def load(draft: str | None, **options: Any) -> dg.Engine:
        chosen: dict[str, Any] = {
            "max_context": 192,
            "max_batch": 4,
            "device": "cpu",
            "lowering": "eager",
        }
        engine = dg.Engine.load(
            TARGET, GOLDEN / draft if draft else None, dg.EngineOptions(**chosen | options)
        )
        engine.rounds.state.storage.fill_(0xFF)
        engine.rounds.arena.fill_(0xFF)
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        assert engine.is_idle
        assert engine.scheduler.slots.free == engine.scheduler.slots.count, (
            "slots were not given back"
        )
        assert engine.scheduler.pages.free == engine.scheduler.pages.count, (
            "pages were not given back"
        )
        engine.close()


class Tools:
    scene = staticmethod(scene)
    Scene = Scene


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
