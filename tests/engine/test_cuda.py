"""The demo pair on a CUDA device, through every lowering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph import executors
from dflash_graph.executors import RoundExecutor, compile_segments, new_arena
from dflash_graph.models.round import declare_round
from dflash_graph.scheduler import Scheduler

pytestmark = pytest.mark.gpu

TOKENS = 64


def load(lowering: str, *, device: str = "cuda", draft: Any = "dflash2", **more: Any) -> dg.Engine:
    choices = {"dtype": "float32", "max_batch": 3, "max_context": 512, **more}
    options = dg.EngineOptions(device=device, lowering=lowering, **choices)  # type: ignore[arg-type]
    return dg.Engine.demo(options, draft=draft)


def cpu_scores(tokens: list[int]) -> torch.Tensor:
    """Scores of the token after `tokens`, by the float32 references on the CPU."""
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, speculative=False)
    model = dg.Model.load(dg.demo.target_directory(), None, options)
    rounds = dg.compile_rounds(model, options)
    last = len(tokens) - 1
    table = [list(range(rounds.capacities.request_pages))]
    prefill = rounds.prefill(last)
    width = prefill.compiled.graphs[0].key.columns
    prefill.inputs.fill(
        ids=[[*tokens[:last], *[0] * (width - last)]],
        positions=[[list(range(width))]] * 3,
        page_table=table,
        live_columns=[last],
    )
    prefill.run()
    declared = declare_round(model.pair, "eager", draft_tokens=0, batch=1, scores=True)
    compiled = compile_segments(declared.segments, rounds.capacities)
    arena = new_arena([compiled.plan], "cpu")
    state = rounds.state.tensors
    executor = RoundExecutor(compiled, arena, model.weights, state, "eager")
    kept: dict[str, torch.Tensor] = {}
    executor.inputs.fill(
        anchor=[tokens[last]],
        frontier=[last],
        live_columns=[1],
        positions=[[[last]]] * 3,
        page_table=table,
    )
    executor.run(0, lambda _, values: kept.update({k: v.clone() for k, v in values.items()}))
    return kept["verify/scores"][0, 0]


@pytest.mark.parametrize("draft", ["dflash", "dflash2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_kernels_speculate_as_they_decode(draft: str, dtype: str, cuda_graphs: bool) -> None:
    prompts, params = dg.demo.prompts()[:4], dg.SamplingParams(max_new_tokens=TOKENS)
    more = {"draft": draft, "dtype": dtype, "cuda_graphs": cuda_graphs}
    with load("triton", **more) as fast, load("triton", speculative=False, **more) as plain:
        found, expected = fast.generate(prompts, params), plain.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert sum(len(r.rounds) for r in found) < sum(len(r.rounds) for r in expected) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_text_of_kernels_is_the_cpus_or_parts_at_a_near_tie(dtype: str) -> None:
    prompts, params = dg.demo.prompts()[:6], dg.SamplingParams(max_new_tokens=TOKENS)
    with load("triton", dtype=dtype) as there, load("eager", device="cpu") as here:
        found, expected = there.generate(prompts, params), here.generate(prompts, params)
        assert here.tokenizer is not None
        ids = [here.tokenizer.encode(prompt) for prompt in prompts]
    bound = 1e-3 if dtype == "float32" else 0.3
    for prompt, left, right in zip(ids, found, expected, strict=True):
        pairs = enumerate(zip(left.token_ids, right.token_ids, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is None:
            assert left.token_ids == right.token_ids
            continue
        scores = cpu_scores([*prompt, *right.token_ids[:first]])
        gap = float(scores[right.token_ids[first]] - scores[left.token_ids[first]])
        assert 0 <= gap < bound, f"token {first}: the scores differ by {gap}"


def test_sampled_rows_of_kernels_in_company() -> None:
    params = [
        dg.SamplingParams(max_new_tokens=TOKENS),
        dg.SamplingParams(temperature=0.8, seed=3, max_new_tokens=TOKENS),
        dg.SamplingParams(
            temperature=1.1, seed=2**40 + 1, top_k=20, top_p=0.9, presence_penalty=0.3
        ),
    ]
    prompts = dg.demo.prompts()[:3]
    with load("triton") as engine:
        alone = [
            engine.generate([p], [law])[0].token_ids for p, law in zip(prompts, params, strict=True)
        ]
        assert [r.token_ids for r in engine.generate(prompts, params)] == alone
    with load("triton", cuda_graphs=False) as engine:
        assert [r.token_ids for r in engine.generate(prompts, params)] == alone


def test_rounds_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph in two parts, and the host's rehearsals during the second, change no token."""
    laws = [
        dg.SamplingParams(max_new_tokens=TOKENS),
        dg.SamplingParams(max_new_tokens=TOKENS, temperature=0.8, seed=3),
    ]
    prompts = dg.demo.prompts()[:3]
    with load("triton") as whole:
        expected = [[r.token_ids for r in whole.generate(prompts, law)] for law in laws]
    monkeypatch.setattr(executors, "_TAIL_BYTES", 1 << 20)
    played = []
    play = Scheduler.advance

    def advance(scheduler: Scheduler) -> None:
        played.append(scheduler)
        play(scheduler)

    monkeypatch.setattr(Scheduler, "advance", advance)
    with load("triton") as cut:
        forward = cut.rounds[3].compiled.schedules[0]
        assert 0 < executors.tail(forward) < len(forward.steps)
        found = [[r.token_ids for r in cut.generate(prompts, law)] for law in laws]
        assert any(scheduler is not cut.scheduler for scheduler in played), "rehearsed"
    assert found == expected


def test_five_thousand_rounds_take_no_more_memory() -> None:
    params = dg.SamplingParams(max_new_tokens=200, ignore_eos=True)
    prompts = dg.demo.prompts()
    with load("triton", dtype="bfloat16") as engine:
        sizes = []
        for turn in range(10_000):
            engine.generate([prompts[(turn + i) % len(prompts)][:40] for i in range(3)], params)
            torch.cuda.synchronize()
            # What the device has free follows other processes too, so it is not asked.
            sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            if engine.statistics.rounds >= 15_000:
                break
        assert engine.statistics.rounds >= 15_000
    assert len(set(sizes[2:])) == 1, f"memory changed: {sorted(set(sizes[2:]))}"


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_speculation_equals_plain_decoding(lowering: str) -> None:
    prompts, params = dg.demo.prompts()[:3], dg.SamplingParams(max_new_tokens=TOKENS)
    with load(lowering) as fast, load(lowering, speculative=False) as plain:
        found, expected = fast.generate(prompts, params), plain.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert sum(len(r.rounds) for r in found) < sum(len(r.rounds) for r in expected) / 2


def test_the_text_is_the_cpus() -> None:
    prompts, params = dg.demo.prompts()[:3], dg.SamplingParams(max_new_tokens=TOKENS)
    with load("eager") as there, load("eager", device="cpu") as here:
        found, expected = there.generate(prompts, params), here.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]


def test_sampling_and_contexts(tmp_path: Path) -> None:
    params = dg.SamplingParams(temperature=0.8, seed=3, max_new_tokens=TOKENS, top_p=0.9)
    prompts = dg.demo.prompts()[:3]
    with load("eager") as engine:
        alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
        assert [r.token_ids for r in engine.generate(prompts, params)] == alone
        request = engine.submit(prompts[0], params)
        for _ in range(5):
            engine.step()
        published = len(request.token_ids)
        engine.checkpoint(request).to_host().save(tmp_path)
        rest = params.replace(max_new_tokens=TOKENS - published)
        restored = engine.restore(tmp_path, rest)
        while not engine.is_idle:
            engine.step()
        assert tuple(request.token_ids) == alone[0]
        assert tuple(restored.token_ids) == alone[0][published:]
