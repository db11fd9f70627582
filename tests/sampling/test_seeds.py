"""A seeded request's text is a function of the request alone: no company, row, chunk or backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.executors import RoundExecutor, compile_segments, new_arena
from dflash_graph.models.round import declare_round

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]


def mixed_params(count: int = 20) -> list[dg.SamplingParams]:
    """Eight requests of every kind: greedy, greedy with penalties, sampled."""
    laws: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"presence_penalty": 0.7},
        {"temperature": 1.3, "seed": 7, "top_k": 4},
        {"temperature": 0.9, "seed": 2**64 - 1, "top_p": 0.8, "frequency_penalty": 0.3},
        {"temperature": -1.0, "top_k": 3, "min_p": 0.5},
        {"temperature": 1.0, "seed": 2**63, "min_p": 0.1, "presence_penalty": -0.5},
        {"temperature": 2.0, "seed": 0},
    ]
    return [dg.SamplingParams(max_new_tokens=count, **law) for law in laws]


def prompts_of(tools: Any) -> list[Ids]:
    return [tuple((i + j * j) % tools.vocab for j in range(1 + 3 * i)) for i in range(8)]


@pytest.mark.parametrize(
    ("draft", "draft_tokens"), [(None, 0), ("dflash", 3), ("dflash2", 1), ("dflash2", 3)]
)
def test_company_and_rows(
    tiny: Any, tools: Any, rng: torch.Generator, draft: str | None, draft_tokens: int
) -> None:
    """Alone, in any row among seven, and in company that leaves at different times."""
    engine = tiny.engine(draft, **({"draft_tokens": draft_tokens} if draft else {}))
    prompts, params = prompts_of(tools), mixed_params()
    alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    for _ in range(3):
        order = torch.randperm(8, generator=rng).tolist()
        together = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        assert together == [alone[i] for i in order]
    for size in (2, 3):
        order = torch.randperm(8, generator=rng).tolist()[:size]
        together = engine.generate([prompts[i] for i in order], [params[i] for i in order])
        assert together == [alone[i] for i in order]


def test_cancelled_neighbours(tiny: Any, tools: Any, rng: torch.Generator) -> None:
    engine = tiny.engine("dflash2", draft_tokens=3)
    prompts, params = prompts_of(tools), mixed_params()
    alone = [engine.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    for _ in range(4):
        requests = [engine.submit(p, q) for p, q in zip(prompts, params, strict=True)]
        victims = torch.randperm(8, generator=rng).tolist()[:4]
        while not engine.is_idle:
            engine.step()
            if victims and torch.rand((), generator=rng) < 0.5:
                engine.cancel(requests[victims.pop()])
        for request, text in zip(requests, alone, strict=True):
            assert tuple(request.token_ids) == text[: len(request.token_ids)]
            assert request.finish_reason == "cancelled" or tuple(request.token_ids) == text


def test_greedy_rows_in_either_executor(tiny: Any, tools: Any) -> None:
    """The same tokens and rounds, whether a batch has sampled rows or not."""
    for draft in ("dflash", "dflash2"):
        engine = tiny.engine(draft, draft_tokens=3)
        greedy = dg.SamplingParams(max_new_tokens=24)
        prompts = prompts_of(tools)[:4]
        together = engine.generate(prompts, greedy)
        company = dg.SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
        mixed = engine.generate([*prompts, prompts[0]], [greedy] * 4 + [company])
        assert mixed[:4] == together


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_prefill_chunks(tiny: Any, tools: Any, new_engine: Load, chunk: int) -> None:
    """Fixed prompts and seeds: no draw lies within rounding of a boundary of its law."""
    prompts, params = prompts_of(tools), mixed_params()
    whole = tiny.engine("dflash2", draft_tokens=3, prefill_chunk=32).generate(prompts, params)
    engine = new_engine("dflash2", draft_tokens=3, prefill_chunk=chunk)
    assert [r.token_ids for r in engine.generate(prompts, params)] == [r.token_ids for r in whole]


def test_inductor(tiny: Any, tools: Any, new_engine: Load) -> None:
    """Fixed prompts and seeds, as for chunks; one round of two rows, a greedy one among them."""
    prompts, params = prompts_of(tools)[2:4], mixed_params(12)[2:4]
    eager = tiny.engine("dflash2", draft_tokens=3).generate(prompts, params)
    engine = new_engine("dflash2", draft_tokens=3, max_batch=2)
    rounds = engine.rounds
    declared = declare_round(rounds.model.pair, "inductor", draft_tokens=3, batch=2, sampling=True)
    compiled = compile_segments(declared.segments, rounds.capacities)
    executor = RoundExecutor(
        compiled,
        new_arena([compiled.plan], "cpu"),
        rounds.model.weights,
        rounds.state.tensors,
        "inductor",
    )
    rounds.sampling = {**rounds.sampling, 2: executor}
    assert engine.generate(prompts, params) == eager


def test_draft_lengths_agree_in_law_only_but_greedy_rows_in_tokens(tiny: Any, tools: Any) -> None:
    prompts = prompts_of(tools)
    params = dg.SamplingParams(max_new_tokens=16, temperature=0.0, seed=5)
    texts = {
        tuple(r.token_ids for r in tiny.engine("dflash2", draft_tokens=k).generate(prompts, params))
        for k in (1, 3, 15)
    }
    assert len(texts) == 1


def test_seeds_differ(tiny: Any, tools: Any) -> None:
    """Every bit of a seed counts."""
    engine = tiny.engine("dflash2", draft_tokens=3)
    seeds = [0, *(2**bit for bit in range(64)), 2**64 - 1]
    params = [dg.SamplingParams(max_new_tokens=24, temperature=3.0, seed=s) for s in seeds]
    texts = [r.token_ids for r in engine.generate([tools.prompt] * len(seeds), params)]
    assert len(set(texts)) == len(seeds)
    again = engine.generate([tools.prompt] * 2, [params[0], params[-1]])
    assert [r.token_ids for r in again] == [texts[0], texts[-1]]


def test_forks_continue_a_sampled_request(tiny: Any, tools: Any) -> None:
    """With its seed a fork goes on exactly as the request did; with others it does not."""
    for draft in ("dflash", "dflash2"):
        engine = tiny.engine(draft, draft_tokens=3)
        params = dg.SamplingParams(
            max_new_tokens=40, temperature=1.1, seed=11, presence_penalty=0.4, frequency_penalty=0.2
        )
        request = engine.submit(tools.prompt, params)
        taken: list[tuple[int, dg.Checkpoint]] = []
        while not engine.is_idle:
            engine.step()
            if request.is_decoding and len(taken) < 5:
                taken.append((len(request.token_ids), engine.checkpoint(request)))
        for length, checkpoint in taken:
            rest = params.replace(max_new_tokens=40 - length)
            forks = [engine.fork(checkpoint, rest), engine.fork(checkpoint, rest.replace(seed=12))]
            tools.drain(engine)
            assert forks[0].token_ids == request.token_ids[length:]
            assert forks[1].token_ids != request.token_ids[length:]
