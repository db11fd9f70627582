"""A tiny pair whose laws can be enumerated, and what plain decoding's law is, number by number.

The law comes from the target's scores of every prefix and from the words of the contract; it shares
no code with the package's sampling.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dflash_graph as dg
from dflash_graph.checkpoint import draft_layout, target_layout
from dflash_graph.geometry import read_draft_geometry, read_target_geometry

GOLDEN = Path(__file__).parents[1] / "golden"

Ids = tuple[int, ...]
Law = dict[int, float]

#: Chance that a right implementation fails one comparison with a law, had it other seeds.
FALSE_ALARM = 1e-6
#: Head rows of the tiny pair, those that may be emitted, and the prompt of every request.
VOCAB, PUBLIC, PROMPT = 8, 6, (1, 4, 2)

_TARGET = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_DRAFT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention"],
    "num_target_layers": 2,
    "sliding_window": 8,
}
_FUSION = {"target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1}


def _write(folder: Path, base: str, changes: Mapping[str, Any], fusion: Mapping[str, Any]) -> None:
    config = json.loads((GOLDEN / base / "config.json").read_text()) | dict(changes)
    if fusion:
        config["dflash_config"] = config.get("dflash_config", {}) | dict(fusion)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def _fill(folder: Path, shapes: Mapping[str, Sequence[int]], prefix: str, seed: int) -> None:
    """Random weights; a component that all embeddings share makes some tokens likelier than others,
    for target and draft alike, so that drafts are accepted often enough to test it.
    """
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(32, generator=torch.Generator().manual_seed(99))
    tensors: dict[str, Tensor] = {}
    for name, shape in sorted(shapes.items()):
        value = torch.randn(tuple(shape), generator=generator)
        if name == "embed_tokens.weight":
            value += common
        elif name == "lm_head.weight":
            value *= 0.3
            value[0] += 0.03 * common
        elif name.endswith("codebook"):
            value *= 0.5
        elif len(shape) >= 2:
            value *= 0.7 / math.sqrt(shape[-1])
        elif name.endswith("norm.weight"):
            value = value * 0.1 + (0.0 if prefix and "linear_attn" not in name else 1.0)
        stored = name if not prefix or name == "lm_head.weight" else prefix + name
        tensors[stored] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")


def write_pair(root: Path) -> None:
    """Directories `target`, `dflash` and `dflash2`."""
    _write(root / "target", "target_dense_2x", _TARGET, {})
    target = read_target_geometry(root / "target")
    _fill(root / "target", target_layout(target).shapes, target.weight_prefix, 3)
    _write(root / "dflash", "dflash_mixed_w6", _DRAFT, _FUSION)
    selector = {"selector_top_k": 4, "selector_rank": 8, "conv_group_size": 8}
    _write(root / "dflash2", "dflash2_g8", _DRAFT, _FUSION | selector)
    for seed, kind in enumerate(("dflash", "dflash2"), 5):
        draft = read_draft_geometry(root / kind)
        _fill(root / kind, draft_layout(draft).shapes, "", seed)


# -- laws ------------------------------------------------------------------------------------------


def row_law(logits: Sequence[float], seen: Mapping[int, int], params: dg.SamplingParams) -> Law:
    """The processed law after some logits, `seen` being the tokens generated so far."""

    def single(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32))

    z = [
        single(
            x
            - single(params.presence_penalty) * (seen.get(v, 0) > 0)
            - single(params.frequency_penalty) * seen.get(v, 0)
        )
        for v, x in enumerate(logits[:PUBLIC])
    ]
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    if params.temperature <= 0:
        return {order[0]: 1.0}
    order = order[: params.top_k] if params.top_k > 0 else order
    weights = {v: math.exp((z[v] - z[order[0]]) / params.temperature) for v in order}
    mass = sum(weights.values())
    kept: list[int] = []
    before = 0.0
    for v in order:
        share = weights[v] / mass
        enough = params.top_p < 1.0 and before >= params.top_p
        if kept and (enough or weights[v] < params.min_p):
            break
        kept.append(v)
        before += share
    total = sum(weights[v] for v in kept)
    return {v: weights[v] / total for v in kept}


class Oracle:
    """Scores of the target after the prompt and any continuation, by plain prefill."""

    def __init__(self, engine: dg.Engine) -> None:
        self._engine = engine
        self._known: dict[Ids, list[float]] = {}

    def logits(self, after: Ids) -> list[float]:
        """Head scores `[V]` after the prompt and `after`."""
        if after not in self._known:
            found: list[Tensor] = []

            def probe(_: object, values: Mapping[str, Tensor]) -> None:
                found.extend(v.clone() for name, v in values.items() if name.endswith("/scores"))

            executor = self._engine.rounds.first_sampled
            run = executor.run
            executor.run = lambda: run(0, probe)  # type: ignore[method-assign]
            try:
                params = dg.SamplingParams(max_new_tokens=1, temperature=1.0)
                self._engine.generate([PROMPT + after], params)
            finally:
                executor.run = run  # type: ignore[method-assign]
            self._known[after] = found[0].flatten().tolist()
        return self._known[after]

    def joint(self, given: Ids, count: int, params: dg.SamplingParams) -> dict[Ids, float]:
        """The law of the `count` tokens after `given`, which were generated too."""
        laws: dict[Ids, float] = {(): 1.0}
        for _ in range(count):
            longer: dict[Ids, float] = {}
            for path, chance in laws.items():
                before = given + path
                law = row_law(self.logits(before), Counter(before), params)
                longer |= {(*path, token): chance * p for token, p in law.items() if p > 0}
            laws = longer
        return laws


def assert_law(observed: Mapping[Any, int], law: Mapping[Any, float], what: str) -> None:
    """Raise AssertionError unless counts come from a law: chi-square over cells of which those
    expected less than 8 times are pooled; a right implementation fails with FALSE_ALARM.
    """
    total = sum(observed.values())
    assert set(observed) <= set(law), f"{what}: impossible {set(observed) - set(law)}"
    cells: list[tuple[float, int]] = []
    few, few_seen = 0.0, 0
    for outcome, p in sorted(law.items(), key=lambda item: item[1]):
        few, few_seen = few + p * total, few_seen + observed.get(outcome, 0)
        if few >= 8.0:
            cells.append((few, few_seen))
            few, few_seen = 0.0, 0
    if few and cells:
        cells[-1] = (cells[-1][0] + few, cells[-1][1] + few_seen)
    freedom = len(cells) - 1
    if freedom < 1:
        return
    statistic = sum((seen - mean) ** 2 / mean for mean, seen in cells)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    chance = float(torch.special.gammaincc(half[0], half[1]))
    assert chance > FALSE_ALARM, (
        f"{what}: chi-square {statistic:.1f} at {freedom} degrees, p = {chance:.1e}"
    )


def assert_joint(texts: Sequence[Ids], law: Mapping[Ids, float], what: str) -> None:
    """Compare whole texts, every position alone, and every pair of neighbours, with a joint law."""
    length = len(next(iter(law)))
    assert {len(text) for text in texts} == {length}
    parts = [slice(0, length), *(slice(i, i + n) for n in (1, 2) for i in range(length - n + 1))]
    for part in parts:
        marginal: Counter[Ids] = Counter()
        for path, p in law.items():
            marginal[path[part]] += p  # type: ignore[assignment]
        assert_law(Counter(text[part] for text in texts), marginal, f"{what} {part}")


# -- engines ---------------------------------------------------------------------------------------


class Tiny:
    """Engines over the tiny pair, one for each set of options, and the oracle of its target."""

    def __init__(self, root: Path) -> None:
        write_pair(root)
        self._root = root
        self._engines: dict[Any, dg.Engine] = {}
        self.oracle = Oracle(self.engine(None, max_batch=1))

    def engine(self, draft: str | None, **options: Any) -> dg.Engine:
        """An engine that other tests may share; it is at rest between tests."""
        key = (draft, *sorted(options.items()))
        if key not in self._engines:
            self._engines[key] = self.new(draft, **options)
        return self._engines[key]

    def new(self, draft: str | None, **options: Any) -> dg.Engine:
        """An engine of one's own, its unwritten bytes poison."""
        chosen: dict[str, Any] = {
            "device": "cpu",
            "lowering": "eager",
            "max_batch": 8,
            "max_context": 64,
            "prefill_chunk": 16,
            "public_vocab": PUBLIC,
        }
        engine = dg.Engine.load(
            self._root / "target",
            self._root / draft if draft else None,
            dg.EngineOptions(**chosen | options),
        )
        engine.rounds.state.storage.fill_(0xFF)
        engine.rounds.arena.fill_(0xFF)
        return engine

    def anchored(self, engine: dg.Engine, prompt: Ids = PROMPT) -> dg.Checkpoint:
        """A checkpoint of the prompt with its greedy first token."""
        request = engine.submit(prompt, dg.SamplingParams(max_new_tokens=1), keep=True)
        while not engine.is_idle:
            engine.step()
        assert request.checkpoint is not None
        return request.checkpoint

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def drain(engine: dg.Engine) -> list[dg.Event]:
    """Step until nothing runs."""
    events: list[dg.Event] = []
    while not engine.is_idle:
        events += engine.step()
    return events


class Tools:
    """What tests of sampling share."""

    vocab, public, prompt = VOCAB, PUBLIC, PROMPT
    row_law = staticmethod(row_law)
    assert_law = staticmethod(assert_law)
    assert_joint = staticmethod(assert_joint)
    drain = staticmethod(drain)
    product = staticmethod(product)


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Generator[Tiny, None, None]:
    made = Tiny(tmp_path_factory.mktemp("pair") / "")
    yield made
    made.close()


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture
def new_engine(tiny: Tiny) -> Generator[Callable[..., dg.Engine], None, None]:
    """`new_engine(draft, **options)`: an engine that must be at rest when the test is over."""
    engines: list[dg.Engine] = []

    def load(draft: str | None, **options: Any) -> dg.Engine:
        engines.append(tiny.new(draft, **options))
        return engines[-1]

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
