"""Pairs, engines over them, and requests that are stopped and continued."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dflash_graph as dg
from dflash_graph import demo
from dflash_graph.contexts import Checkpoint
from dflash_graph.rounds import Model, compile_rounds
from dflash_graph.text import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"

Ids = tuple[int, ...]

#: Name -> directories of target and draft.
DIRECTORIES: dict[str, tuple[Path, Path | None]] = {
    "demo dflash": (demo.target_directory(), demo.draft_directory("dflash")),
    "demo dflash2": (demo.target_directory(), demo.draft_directory("dflash2")),
    "demo plain": (demo.target_directory(), None),
    # Two local draft layers of 16 positions, then a full one.
    "golden mixed": (GOLDEN / "target_dense_2x", GOLDEN / "dflash_mixed_w16"),
    "golden dflash2": (GOLDEN / "target_dense_2x", GOLDEN / "dflash2_g16"),
    "golden plain": (GOLDEN / "target_dense_2x", None),
}


@dataclass
class Run:
    """A finished request, and its checkpoints with what was published before each."""

    request: dg.Request
    checkpoints: list[tuple[int, Checkpoint]] = field(default_factory=list)

    @property
    def text(self) -> Ids:
        return tuple(self.request.token_ids)

    def rounds_after(self, published: int) -> list[dg.RoundRecord]:
        """The rounds behind its first `published` tokens, which end with a round."""
        done, index = 1, 0
        while done < published:
            done += self.request.rounds[index].committed
            index += 1
        assert done == published
        return self.request.rounds[index:]


class Shop:
    """Loaded models, engines over them, and what plain decoding of one request gives."""

    def __init__(self) -> None:
        self.directories = DIRECTORIES
        self._models: dict[tuple[str, str], Model] = {}
        self._plain: dict[str, dg.Engine] = {}
        self._texts: dict[tuple[str, Ids], Ids] = {}

    def model(self, name: str, dtype: str = "float32") -> Model:
        if (name, dtype) not in self._models:
            target, draft = DIRECTORIES[name]
            options = dg.EngineOptions(device="cpu", lowering="eager", dtype=dtype)
            tokenizer = load_tokenizer(target)
            vocab = tokenizer.vocab_size if tokenizer is not None else None
            self._models[name, dtype] = Model.load(target, draft, options, tokenizer_vocab=vocab)
        return self._models[name, dtype]

    def load(self, name: str, *, model: Model | None = None, **options: Any) -> dg.Engine:
        """An engine whose state, arena and frames are poisoned."""
        dtype = options.get("dtype", "float32")
        given = {"max_context": 256, "max_batch": 2, "prefill_chunk": 64, "draft_tokens": 5}
        chosen = dg.EngineOptions(**{"device": "cpu", "lowering": "eager"} | given | options)
        rounds = compile_rounds(model or self.model(name, dtype), chosen)
        engine = dg.Engine(rounds, load_tokenizer(DIRECTORIES[name][0]))
        rounds.state.storage.fill_(0xFF)
        rounds.arena.fill_(0xFF)
        return engine

    def prompt(self, name: str, index: int = 0) -> Ids:
        """Prompts of a pair that its draft continues well."""
        if name.startswith("golden"):
            tensors = load_file(GOLDEN / "e2e_dflash_mixed_w16" / "expected.safetensors")
            return tuple(tensors[f"prompt{index}.ids"].tolist())
        texts = ("def main():\n    ", "import os\nimport ", "class Stack:\n    def push(self, ")
        tokenizer = load_tokenizer(DIRECTORIES[name][0])
        assert tokenizer is not None
        return tuple(tokenizer.encode(texts[index]))

    def plain(self, name: str, prompt: Sequence[int], count: int) -> Ids:
        """`count` tokens of plain greedy decoding, alone, in another engine."""
        family, key = name.split()[0], tuple(prompt)
        known = self._texts.get((family, key), ())
        if len(known) < count:
            if family not in self._plain:
                self._plain[family] = self.load(f"{family} plain", max_batch=1, max_context=512)
            params = dg.SamplingParams(max_new_tokens=count, ignore_eos=True)
            (result,) = self._plain[family].generate([key], params)
            known = self._texts[family, key] = result.token_ids
        return known[:count]

    @staticmethod
    def drain(engine: dg.Engine) -> list[dg.Event]:
        events: list[dg.Event] = []
        while not engine.is_idle:
            events += engine.step()
        return events

    def run(
        self,
        engine: dg.Engine,
        prompt: Ids,
        params: dg.SamplingParams,
        *,
        checkpoints: bool = False,
        **more: Any,
    ) -> Run:
        """Run a request to its end, with a checkpoint after every round if asked."""
        run = Run(engine.submit(prompt, params, **more))
        while not run.request.is_finished:
            engine.step()
            if checkpoints and run.request.is_decoding:
                run.checkpoints.append((len(run.text), engine.checkpoint(run.request)))
        return run

    @staticmethod
    def bytes_of(images: Checkpoint | dict[str, Tensor]) -> dict[str, bytes]:
        """The bytes of each image."""
        named = images.images if isinstance(images, Checkpoint) else images
        return {
            name: image.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, image in named.items()
        }

    @staticmethod
    def is_at_rest(engine: dg.Engine) -> bool:
        return (
            engine.is_idle
            and engine.scheduler.slots.free == engine.scheduler.slots.count
            and engine.scheduler.pages.free == engine.scheduler.pages.count
        )


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shop() -> Shop:
    return Shop()


@pytest.fixture
def load(shop: Shop) -> Generator[Callable[..., dg.Engine], None, None]:
    """`load(pair, **options)`: a poisoned engine that must be at rest when the test is over."""
    engines: list[dg.Engine] = []

    def load(name: str, **options: Any) -> dg.Engine:
        engines.append(shop.load(name, **options))
        return engines[-1]

    yield load
    for engine in engines:
        assert shop.is_at_rest(engine), "slots or pages were not given back"
        engine.close()


@pytest.fixture
def sampled(rng: torch.Generator) -> dg.SamplingParams:
    """Sampling with penalties and a fresh seed."""
    return dg.SamplingParams(
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=int(torch.randint(2**62, (), generator=rng)),
        ignore_eos=True,
    )
