"""Lengths, budgets, capacity and stop tokens at their edges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dflash_graph as dg
from dflash_graph.geometry import target_geometry_from_config
from dflash_graph.lowering.schedules import lowered
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.profiles import load_preset

Load = Callable[..., dg.Engine]

PAIRS = ("dflash_mixed_w16", "dflash2_g16")


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("draft_tokens", [1, 7, 15])
def test_every_budget(lab: Any, load: Load, name: str, draft_tokens: int) -> None:
    """Budgets 1..2 W + 1: tail rounds verify fewer drafts and publish no token too many."""
    case = lab.case(name)
    engine = load(name, draft_tokens=draft_tokens, max_batch=8)
    budgets = range(1, 2 * draft_tokens + 4)
    results = engine.generate(
        [case.prompts[1]] * len(budgets), [dg.SamplingParams(max_new_tokens=n) for n in budgets]
    )
    for budget, result in zip(budgets, results, strict=True):
        assert result.token_ids == case.greedy[1][:budget] and result.finish_reason == "length"
        remaining = budget - 1
        for record in result.rounds:
            assert record.proposed == min(draft_tokens, remaining)
            remaining -= record.committed
        assert remaining == 0
    assert results[0].rounds == ()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 80])
def test_capacity(lab: Any, load: Load, random_ids: Any, name: str, length: int) -> None:
    """Prompt and output together fill the context and no more, on a page edge and beside it."""
    vocab = lab.case(name).vocab
    for capacity in sorted(
        {length + 1, length + 2, length + 9, 64, 65, 128} - set(range(length + 1))
    ):
        engine = load(name, draft_tokens=7, max_context=capacity, max_batch=2)
        prompt = random_ids(length, vocab)
        room = min(capacity - length, 24)
        params = dg.SamplingParams(max_new_tokens=1000 if room < 24 else 24)
        for result in engine.generate([prompt, prompt], params):
            assert result.token_ids == lab.plain(name, prompt, room)
            assert result.finish_reason == "length"


def test_capacity_of_one_step(lab: Any, load: Load, random_ids: Any) -> None:
    """The longest prompt that is taken leaves room for exactly one token; one longer is refused."""
    engine = load("dflash2_g16", max_context=64)
    prompt = random_ids(63, 160)
    (result,) = engine.generate([prompt], dg.SamplingParams(max_new_tokens=5))
    assert result.token_ids == lab.plain("dflash2_g16", prompt, 1)
    assert (result.finish_reason, result.rounds) == ("length", ())
    with pytest.raises(dg.RequestError, match=r"fewer than 64 .*got 64"):
        engine.submit((*prompt, 1))


@pytest.mark.parametrize("draft_tokens", [3, 15])
@pytest.mark.parametrize("name", PAIRS)
def test_stop_token_anywhere(lab: Any, load: Load, name: str, draft_tokens: int) -> None:
    """Every token of an output as the stop token: first, inside an accepted block, at its end."""
    case = lab.case(name)
    engine = load(name, draft_tokens=draft_tokens, max_batch=8)
    greedy = case.greedy[1]
    stops = sorted(set(greedy), key=greedy.index)
    params = [dg.SamplingParams(max_new_tokens=48, stop_token_ids=(token, 159)) for token in stops]
    results = engine.generate([case.prompts[1]] * len(stops), params)
    inside = 0
    for token, result in zip(stops, results, strict=True):
        end = min(greedy.index(t) for t in (token, 159) if t in greedy) + 1
        assert result.token_ids == greedy[:end] and result.finish_reason == "stop"
        if result.rounds:
            inside += result.rounds[-1].committed < result.rounds[-1].licensed
    assert results[0].token_ids == greedy[:1] and results[0].rounds == ()
    assert inside, "some stop tokens should lie inside an accepted block"


def test_stop_and_budget_at_one_token(lab: Any, load: Load) -> None:
    """The stop token as the last of the budget is a stop; as the one behind it, it never comes."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7)
    for index in (0, 1, 5, 9):
        token = case.greedy[0][index]
        end = case.greedy[0].index(token) + 1
        for budget, reason in ((end, "stop"), (end + 1, "stop"), (end - 1, "length")):
            if budget:
                params = dg.SamplingParams(max_new_tokens=budget, stop_token_ids=(token,))
                (result,) = engine.generate([case.prompts[0]], params)
                assert result.token_ids == case.greedy[0][: min(end, budget)]
                assert result.finish_reason == reason


def test_end_of_sequence(lab: Any, tmp_path: Path) -> None:
    """The checkpoint's ids stop a request unless it asks not to."""
    case = lab.case("dflash2_g16")
    for file in case.target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    end = case.greedy[0].index(case.greedy[0][9]) + 1
    eos = [159, case.greedy[0][end - 1]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=2, max_context=128)
    with dg.Engine.load(tmp_path, case.draft, options) as engine:
        params = [dg.SamplingParams(max_new_tokens=48, ignore_eos=flag) for flag in (False, True)]
        stopped, full = engine.generate([case.prompts[0]] * 2, params)
    assert (stopped.token_ids, stopped.finish_reason) == (case.greedy[0][:end], "stop")
    assert (full.token_ids, full.finish_reason) == (case.greedy[0], "length")


def test_a_target_without_full_attention() -> None:
    """Nothing of it has positions or pages; a request in company is as alone."""
    config = dict(load_preset("demo-dflash")["target"], num_hidden_layers=3)
    del config["layer_types"]
    geometry = target_geometry_from_config(config, "config.json")
    assert set(geometry.layer_types) == {"linear_attention"}
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=2, max_context=64)
    model = dg.Model.random(ModelPair(geometry), options)
    params = dg.SamplingParams(max_new_tokens=6, ignore_eos=True)
    prompts = [[1, 2, 3], [5]]
    with dg.Engine(dg.compile_rounds(model, options)) as engine:
        together = engine.generate(prompts, params)
        assert together == [engine.generate([prompt], params)[0] for prompt in prompts]
    for backend in ("inductor", "triton"):
        for graph in declare_round(model.pair, backend, draft_tokens=0, batch=2).segments:
            lowered(graph)
