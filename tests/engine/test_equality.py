"""Greedy speculative output is plain decoding's, whatever K, B, company, length or chunk size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]


def mixed_prompts(lab: Any, name: str, rng: torch.Generator, random_ids: Any) -> list[Ids]:
    """14 prompts: golden ones with part of their output (these draft well), and random ids."""
    case = lab.case(name)
    cuts = torch.randint(48, (6,), generator=rng).tolist()
    prompts = [case.cut(index % 3, cut)[0] for index, cut in enumerate(cuts)]
    lengths = [1, 2, *torch.randint(3, 80, (6,), generator=rng).tolist()]
    prompts += [random_ids(length, case.vocab) for length in lengths]
    return [prompts[i] for i in torch.randperm(len(prompts), generator=rng).tolist()]


def check_batches(
    lab: Any, engine: dg.Engine, name: str, prompts: list[Ids], rng: torch.Generator
) -> None:
    """Prompts in batches of 1, 2, 3 and 8, with budgets of their own."""
    budgets = torch.randint(1, 21, (len(prompts),), generator=rng).tolist()
    start = 0
    for batch in (1, 2, 3, 8):
        some = slice(start, start + batch)
        start += batch
        params = [dg.SamplingParams(max_new_tokens=n) for n in budgets[some]]
        results = engine.generate(prompts[some], params)
        for prompt, budget, result in zip(prompts[some], budgets[some], results, strict=True):
            assert result.token_ids == lab.plain(name, prompt, budget), (batch, prompt)
            assert result.finish_reason == "length"


@pytest.mark.parametrize("draft_tokens", range(1, 16))
@pytest.mark.parametrize("name", ["dflash_mixed_w16", "dflash2_g16"])
def test_every_draft_length(
    lab: Any, load: Load, rng: torch.Generator, random_ids: Any, name: str, draft_tokens: int
) -> None:
    prompts = mixed_prompts(lab, name, rng, random_ids)
    engine = load(name, draft_tokens=draft_tokens, max_batch=8, max_context=128)
    check_batches(lab, engine, name, prompts, rng)


@pytest.mark.parametrize("draft_tokens", [1, 6, 15])
@pytest.mark.parametrize("name", ["dflash_mixed_w6", "dflash_host_full_attention"])
def test_other_pairs(
    lab: Any, load: Load, rng: torch.Generator, random_ids: Any, name: str, draft_tokens: int
) -> None:
    prompts = mixed_prompts(lab, name, rng, random_ids)
    engine = load(name, draft_tokens=draft_tokens, max_batch=8, max_context=128)
    check_batches(lab, engine, name, prompts, rng)


@pytest.mark.parametrize("name", ["dflash_mixed_w6", "dflash2_g16"])
def test_page_edges_and_rings(lab: Any, load: Load, random_ids: Any, name: str) -> None:
    """Prompts around multiples of the page and around the rings of 6 and 16 positions."""
    engine = load(name, draft_tokens=7, max_batch=8, max_context=320)
    vocab = lab.case(name).vocab
    lengths = (63, 64, 65, 127, 128, 129, 255, 256, 5, 6, 7, 15, 16, 17)
    prompts = [random_ids(length, vocab) for length in lengths]
    results = engine.generate(prompts, dg.SamplingParams(max_new_tokens=12))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == lab.plain(name, prompt, 12), len(prompt)


@pytest.mark.parametrize("frontier", [62, 63, 64])
def test_outputs_across_a_page_edge(lab: Any, load: Load, frontier: int) -> None:
    """Blocks that begin before, on and behind a page edge, where the drafts are accepted."""
    for name in ("dflash_mixed_w16", "dflash2_g16"):
        case = lab.case(name)
        prompt, rest = case.cut(2, frontier - len(case.prompts[2]))
        engine = load(name, draft_tokens=7)
        (result,) = engine.generate([prompt], dg.SamplingParams(max_new_tokens=len(rest)))
        assert len(prompt) == frontier and result.token_ids == rest
        assert max(r.accepted for r in result.rounds) == 7


@pytest.mark.parametrize("name", ["dflash_mixed_w16", "dflash2_g16", "dflash_mixed_w6"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 1024])
def test_prefill_chunks(lab: Any, load: Load, name: str, chunk: int) -> None:
    """Golden prompts and continuations: no choice is a near tie that other chunks might turn."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=4, prefill_chunk=chunk)
    cuts = [(0, 0), (1, 0), (2, 0), (0, 1), (0, 11), (1, 30), (2, 40), (2, 24)]
    prompts, rests = zip(*(case.cut(*cut) for cut in cuts), strict=True)
    params = [dg.SamplingParams(max_new_tokens=len(rest)) for rest in rests]
    results = engine.generate(prompts, params)
    assert tuple(result.token_ids for result in results) == rests


def test_company_changes_nothing(
    lab: Any, load: Load, rng: torch.Generator, random_ids: Any
) -> None:
    """Text and rounds of a request are the same alone or among seven, in any row and slot."""
    for name in ("dflash_mixed_w16", "dflash2_g16"):
        prompts = mixed_prompts(lab, name, rng, random_ids)[:8]
        engine = load(name, draft_tokens=7, max_batch=8)
        params = dg.SamplingParams(max_new_tokens=20)
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        order = torch.randperm(len(prompts), generator=rng).tolist()
        together = engine.generate([prompts[i] for i in order], params)
        assert together == [alone[i] for i in order]


def test_draft_state_never_changes_the_text(lab: Any, load: Load, rng: torch.Generator) -> None:
    """Noise in the draft's context costs acceptance, never a token."""
    for name in ("dflash_mixed_w16", "dflash2_g16"):
        case = lab.case(name)
        engine = load(name, draft_tokens=7, max_batch=3)
        requests = [engine.submit(p, dg.SamplingParams(max_new_tokens=48)) for p in case.prompts]
        while not engine.is_idle:
            for key, pool in engine.rounds.state.tensors.items():
                if key.startswith("draft."):
                    pool.copy_(torch.randn(pool.shape, generator=rng))
            engine.step()
        assert tuple(tuple(r.token_ids) for r in requests) == case.greedy


def test_public_vocabulary(lab: Any, load: Load) -> None:
    """Rows past the public vocabulary are never emitted, with or without speculation."""
    for name in ("dflash_mixed_w16", "dflash2_g16"):
        case = lab.case(name)
        params = dg.SamplingParams(max_new_tokens=48)
        texts = []
        for options in ({"speculative": False}, {"draft_tokens": 7}):
            engine = load(name, public_vocab=100, max_batch=3, **options)
            texts.append([result.token_ids for result in engine.generate(case.prompts, params)])
        assert texts[0] == texts[1]
        assert max(token for ids in texts[0] for token in ids) < 100
        assert max(token for ids in case.greedy for token in ids) >= 100


def test_threads(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    torch.set_num_threads(2)
    try:
        results = load("dflash2_g16", max_batch=3).generate(
            case.prompts, dg.SamplingParams(max_new_tokens=12)
        )
    finally:
        torch.set_num_threads(1)
    assert [r.token_ids for r in results] == [ids[:12] for ids in case.greedy]
