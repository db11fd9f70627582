"""Stored prefixes: the longest is found, its text is the same, its memory is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.contexts import Checkpoint, Coverage, PrefixCache

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]

PAIRS = ("demo dflash", "demo dflash2", "demo plain", "golden mixed")
PARAMS = dg.SamplingParams(max_new_tokens=10, ignore_eos=True)
PLENTY = 2**30


def stored(engine: dg.Engine) -> set[Ids]:
    return set(engine.scheduler.prefixes._stored)


class Prefills:
    """Tokens that prefill passes of an engine processed."""

    def __init__(self, engine: dg.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        chunk = engine.scheduler._prefill_chunk

        def counted(request: dg.Request) -> None:
            start = request.frontier
            chunk(request)
            self.tokens += request.frontier - start

        monkeypatch.setattr(engine.scheduler, "_prefill_chunk", counted)

    def since(self) -> int:
        tokens, self.tokens = self.tokens, 0
        return tokens


# -- the store alone -------------------------------------------------------------------------------


def entry(tokens: Sequence[int], nbytes: int) -> Checkpoint:
    images = {"x": torch.zeros(nbytes, dtype=torch.uint8)}
    return Checkpoint(Coverage("", "", ""), tuple(tokens), 0, (0,), 0, False, images)


def test_longest() -> None:
    cache = PrefixCache(100)
    for tokens in ((1,), (1, 2, 3), (1, 2), (2,), (1, 2, 4, 5)):
        cache.store(entry(tokens, 1))
    for prompt, found in (
        ((1, 2, 3, 9), (1, 2, 3)),
        ((1, 2, 3), (1, 2, 3)),
        ((1, 2, 4), (1, 2)),
        ((1, 9), (1,)),
        ((2, 1), (2,)),
        ((3,), None),
    ):
        best = cache.longest(prompt)
        assert (best.tokens if best is not None else None) == found
    assert cache.hits == 5


def test_least_recently_used() -> None:
    cache = PrefixCache(30)
    for first in (1, 2, 3):
        cache.store(entry((first,), 10))
    assert len(cache) == 3 and cache.nbytes == 30
    cache.longest((1, 9))
    cache.store(entry((4,), 10))
    assert set(cache._stored) == {(1,), (3,), (4,)}, "2 was not used for longest"
    cache.store(entry((3,), 10))  # stored again counts as a use, and once
    cache.store(entry((5,), 11))
    assert set(cache._stored) == {(3,), (5,)} and cache.nbytes == 21
    cache.store(entry((6,), 31))
    assert set(cache._stored) == {(3,), (5,)}, "what never fits drops nothing"
    cache.store(entry((6,), 30))
    assert set(cache._stored) == {(6,)} and cache.nbytes == 30
    cache.drop([(6,), (7,)])
    assert len(cache) == 0 and cache.nbytes == 0
    nothing = PrefixCache(0)
    nothing.store(entry((1,), 10))
    assert len(nothing) == 0 and nothing.longest((1,)) is None


# -- in an engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_conversation(
    shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch, rng: torch.Generator, name: str
) -> None:
    """Each turn is the last one, its answer and something new: only that is prefilled."""
    engine = load(name, prefix_cache_bytes=PLENTY)
    prefills = Prefills(engine, monkeypatch)
    vocab = engine.rounds.model.pair.emitted_vocab
    prompt = shop.prompt(name)
    reused = 0
    known = 0
    for _ in range(4):
        (result,) = engine.generate([prompt], PARAMS)
        assert result.token_ids == shop.plain(name, prompt, 10)
        assert prefills.since() == len(prompt) - known
        reused += known
        assert engine.statistics.prefix_tokens == reused
        known = len(prompt) + 9  # the last token of the answer is not processed
        new = tuple(torch.randint(vocab - 1, (7,), generator=rng).tolist())
        prompt = (*prompt, *result.token_ids, *new)
    assert shop.is_at_rest(engine), "stored state takes no slots and no pages"


@pytest.mark.parametrize("name", PAIRS)
def test_whole_prompt(
    shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch, sampled: dg.SamplingParams, name: str
) -> None:
    """The same prompt again needs no prefill at all, greedy or sampled."""
    engine, fresh = load(name, prefix_cache_bytes=PLENTY), load(name)
    prefills = Prefills(engine, monkeypatch)
    prompt = shop.prompt(name, 1)
    drawn = sampled.replace(max_new_tokens=12)
    expected = fresh.generate([prompt, prompt, prompt], [PARAMS, drawn, drawn.replace(seed=3)])
    for index, params in enumerate((PARAMS, drawn, drawn.replace(seed=3))):
        (result,) = engine.generate([prompt], params)
        assert result == expected[index]
        assert prefills.since() == (len(prompt) if index == 0 else 0)
    assert engine.statistics.prefix_tokens == 2 * len(prompt)


def test_shared_instructions(shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike, of which none is a prefix of another, share what one ended with."""
    engine = load("demo dflash2", prefix_cache_bytes=PLENTY, max_batch=3)
    prefills = Prefills(engine, monkeypatch)
    system = shop.prompt("demo dflash2", 2) * 3
    engine.generate([system], PARAMS.replace(max_new_tokens=1))
    prefills.since()
    prompts = [(*system, *tail) for tail in ((5, 6), (7,), (8, 9, 10), (5, 9))]
    results = engine.generate(prompts, PARAMS)
    assert prefills.since() == 2 + 1 + 3 + 2
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == shop.plain("demo dflash2", prompt, 10)
    # One token more or less than a stored prefix, and one that differs inside it.
    for prompt, count in ((system[:-1], len(system) - 1), ((9, *system[1:]), len(system))):
        (result,) = engine.generate([prompt], PARAMS)
        assert result.token_ids == shop.plain("demo dflash2", prompt, 10)
        assert prefills.since() == count


def test_bytes(shop: Any, load: Load) -> None:
    """Never more than the budget; too little for one, or none at all, stores nothing."""
    prompts = [shop.prompt("golden mixed", i) for i in range(3)]
    measured = load("golden mixed", prefix_cache_bytes=PLENTY)
    measured.generate(prompts[:1], PARAMS)
    sizes = [c.nbytes for c in measured.scheduler.prefixes._stored.values()]
    assert measured.scheduler.prefixes.nbytes == sum(sizes) and len(sizes) == 2
    for budget, most in ((0, 0), (min(sizes) - 1, 0), (min(sizes), 1), (3 * max(sizes), 3)):
        engine = load("golden mixed", prefix_cache_bytes=budget)
        for _ in range(2):
            for prompt in prompts:
                (result,) = engine.generate([prompt], PARAMS)
                assert result.token_ids == shop.plain("golden mixed", prompt, 10)
                held = [c.nbytes for c in engine.scheduler.prefixes._stored.values()]
                assert sum(held) == engine.scheduler.prefixes.nbytes <= budget and len(held) <= most
        assert len(engine.scheduler.prefixes) == most
        if not most:
            assert engine.statistics.prefix_tokens == engine.scheduler.prefixes.hits == 0


def test_never_for_multimodal(shop: Any, load: Load, rng: torch.Generator) -> None:
    """Neither what they ask for nor what they leave behind, nor what forks of them leave."""
    engine = load("demo dflash2", prefix_cache_bytes=PLENTY)
    prompt = shop.prompt("demo dflash2")
    expected = shop.plain("demo dflash2", prompt, 10)
    hidden = engine.rounds.model.pair.target.hidden
    rows = {1: torch.randn(hidden, generator=rng) * 0.1}
    positions = torch.arange(len(prompt)).expand(3, -1) + torch.tensor([[0], [2], [4]])
    for given in ({"embeddings": rows}, {"positions": positions}):
        run = shop.run(engine, prompt, PARAMS, keep=True, **given)
        assert not stored(engine)
        fork = engine.fork(run.request.checkpoint, PARAMS, keep=True)
        shop.drain(engine)
        last = engine.restore(fork.checkpoint.to_host(), PARAMS)
        shop.drain(engine)
        assert last.finish_reason == "length" and not stored(engine)
    (result,) = engine.generate([prompt], PARAMS)
    assert result.token_ids == expected and len(stored(engine)) == 2
    apart = shop.run(load("demo dflash2"), prompt, PARAMS, embeddings=rows)
    again = shop.run(engine, prompt, PARAMS, embeddings=rows)
    assert again.text == apart.text != expected
    assert engine.statistics.prefix_tokens == 0


def test_multimodal_is_saved(shop: Any, load: Load, tmp_path: Any) -> None:
    """That a context is multimodal survives files: its forks leave no prefix for text either."""
    engine = load("golden mixed", prefix_cache_bytes=PLENTY)
    prompt = shop.prompt("golden mixed")
    rows = {0: torch.zeros(engine.rounds.model.pair.target.hidden)}
    run = shop.run(engine, prompt, PARAMS, keep=True, embeddings=rows)
    assert run.request.checkpoint.is_multimodal and run.request.checkpoint.rope_delta == 0
    run.request.checkpoint.save(tmp_path)
    engine.restore(tmp_path, PARAMS)
    shop.drain(engine)
    assert not stored(engine)


def test_forks_leave_prefixes(shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fork ended with is a prefix like any other."""
    engine = load("golden mixed", prefix_cache_bytes=PLENTY)
    prompt = shop.prompt("golden mixed")
    text = shop.plain("golden mixed", prompt, 30)
    run = shop.run(engine, prompt, PARAMS, keep=True)
    engine.fork(run.request.checkpoint, PARAMS)
    shop.drain(engine)
    prefills = Prefills(engine, monkeypatch)
    (result,) = engine.generate([(*prompt, *text[:20])], PARAMS)
    assert result.token_ids == text[20:] and prefills.since() == 1


@pytest.mark.parametrize("evicted", [False, True])
def test_interrupted_prefill(
    shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch, evicted: bool
) -> None:
    """Half-written state after a hit: it starts again from the prefix, or from nothing if gone."""
    engine = load("golden mixed", prefix_cache_bytes=PLENTY, prefill_chunk=16, max_batch=1)
    prefix = shop.prompt("golden mixed", 2)
    prompt = prefix + prefix[::-1]
    engine.generate([prefix], PARAMS.replace(max_new_tokens=1))
    prefills = Prefills(engine, monkeypatch)
    request = engine.submit(prompt, PARAMS)
    engine.step()
    assert len(prefix) < request.frontier < len(prompt)
    assert engine.statistics.prefix_tokens == len(prefix)
    executor = engine.rounds.prefill(16)

    def stops(*args: Any) -> None:
        engine.rounds.state.tensors["target.layers.0.gdn_state"][request.slot] = 7.0
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(executor, "run", stops)
            if evicted:
                engine.scheduler.prefixes.drop(stored(engine))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    known = 0 if evicted else len(prefix)
    assert request.frontier == known
    prefills.since()
    shop.drain(engine)
    assert tuple(request.token_ids) == shop.plain("golden mixed", prompt, 10)
    assert prefills.since() == len(prompt) - known
    assert engine.statistics.prefix_tokens == known, "a prompt that starts again counts once"


def test_interrupted_first_token(shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that cannot be stored costs its request nothing."""
    engine = load("golden mixed", prefix_cache_bytes=PLENTY)
    prompt = shop.prompt("golden mixed")
    request = engine.submit(prompt, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.rounds.state, "image", _raises)
        with pytest.raises(MemoryError):
            engine.step()
    shop.drain(engine)
    assert tuple(request.token_ids) == shop.plain("golden mixed", prompt, 10)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_failed_keep(shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """A checkpoint that cannot be taken at an end: that one ends, and the rest of the round too."""
    engine = load("golden mixed", max_batch=3)
    prompts = [shop.prompt("golden mixed", i) for i in range(3)]
    budgets = [8, 8, 8]
    budgets[first] = 4
    requests = [
        engine.submit(prompt, PARAMS.replace(max_new_tokens=budget), keep=index == first)
        for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    raised = 0
    events: list[dg.Event] = []
    monkeypatch.setattr(engine.rounds.state, "image", _raises)
    while not engine.is_idle:
        try:
            events += engine.step()
        except MemoryError:
            raised += 1
    events += engine.step()
    assert raised == 1
    for index, request in enumerate(requests):
        assert request.finish_reason == "length" and request.checkpoint is None
        assert tuple(request.token_ids) == shop.plain(
            "golden mixed", prompts[index], budgets[index]
        )
        assert sum(r.committed for r in request.rounds) == budgets[index] - 1
        mine = [e for e in events if e.request_id == request.id]
        assert [t for e in mine for t in e.token_ids] == request.token_ids
        assert [e.finish_reason for e in mine if e.finish_reason] == ["length"]


def _raises(*args: Any) -> dict[str, torch.Tensor]:
    raise MemoryError("no memory for an image")
