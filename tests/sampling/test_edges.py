"""Limits of the sampling values, the public vocabulary, failures, and what a round keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.executors import compile_segments
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.profiles import load_preset
from dflash_graph.state import Capacities

Load = Callable[..., dg.Engine]

PAIRS = [(None, 0), ("dflash", 3), ("dflash2", 1), ("dflash2", 3)]
PROMPTS = [(1, 4, 2), (0,), (3, 3, 3, 7, 6), (5, 1), (2,) * 17, (4, 5), (6,), (7, 0, 1)]
#: The least positive temperature that is not refused, and the greatest.
COLDEST, HOTTEST = 2.0**-126, float(torch.finfo(torch.float32).max)


def engine_of(tiny: Any, draft: str | None, draft_tokens: int) -> dg.Engine:
    engine: dg.Engine = tiny.engine(draft, **({"draft_tokens": draft_tokens} if draft else {}))
    return engine


@pytest.mark.parametrize(("draft", "draft_tokens"), PAIRS)
def test_laws_of_one_token(tiny: Any, draft: str | None, draft_tokens: int) -> None:
    """Each of these leaves one token, the greedy one."""
    engine = engine_of(tiny, draft, draft_tokens)
    greedy = [r.token_ids for r in engine.generate(PROMPTS, dg.SamplingParams(max_new_tokens=16))]
    for law in (
        {"temperature": COLDEST},
        {"temperature": 1e-4},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": HOTTEST, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 2.0**-149},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": COLDEST, "top_k": 3, "top_p": 0.5, "min_p": 0.5},
        {"temperature": -HOTTEST},
        {"temperature": -0.0, "top_p": 0.0, "top_k": 2**31 - 1},
    ):
        params = [dg.SamplingParams(max_new_tokens=16, seed=s, **law) for s in range(len(PROMPTS))]
        assert [r.token_ids for r in engine.generate(PROMPTS, params)] == greedy, law


@pytest.mark.parametrize(("draft", "draft_tokens"), PAIRS)
def test_public_vocabulary(tiny: Any, tools: Any, draft: str | None, draft_tokens: int) -> None:
    """The hottest law is uniform over the public ids, and no other id is ever emitted."""
    engine = engine_of(tiny, draft, draft_tokens)
    params = [
        dg.SamplingParams(max_new_tokens=40, temperature=HOTTEST, seed=s, top_k=k, top_p=p)
        for s, (k, p) in enumerate([(0, 1.0), (7, 1.0), (8, 1.0), (-1, 1.0), (2**31 - 1, 1.0)] * 4)
    ]
    results = engine.generate([PROMPTS[i % 8] for i in range(len(params))], params)
    tokens = [t for result in results for t in result.token_ids]
    observed = {t: tokens.count(t) for t in set(tokens)}
    tools.assert_law(observed, {t: 1 / tools.public for t in range(tools.public)}, "uniform")


def test_large_penalties(tiny: Any) -> None:
    """Six public ids: an unbearable penalty uses each once, in every round of six."""
    for draft, draft_tokens in PAIRS:
        engine = engine_of(tiny, draft, draft_tokens)
        for temperature in (0.0, 1.0):
            params = dg.SamplingParams(
                max_new_tokens=18, temperature=temperature, frequency_penalty=1e4, seed=4
            )
            for result in engine.generate(PROMPTS, params):
                for start in (0, 6, 12):
                    assert set(result.token_ids[start : start + 6]) == set(range(6))
            never = params.replace(frequency_penalty=-1e4, presence_penalty=-1e4)
            for result in engine.generate(PROMPTS, never):
                assert len(set(result.token_ids)) == 1


@pytest.mark.parametrize("kind", ["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits(tiny: Any, new_engine: Load, kind: str, temperature: float) -> None:
    """They end their request with a named error; its neighbours' texts are as without it."""
    engine = new_engine("dflash2", draft_tokens=3)
    laws = [{"temperature": 1.0}, {"presence_penalty": 0.5}, {}, {"temperature": temperature}]
    params = [dg.SamplingParams(max_new_tokens=20, seed=i, **law) for i, law in enumerate(laws)]
    expected = engine.generate(PROMPTS[:4], params)
    requests = [engine.submit(p, q) for p, q in zip(PROMPTS, params, strict=False)]
    bad = requests[3]
    while len(bad.token_ids) < 6:
        engine.step()
    published = list(bad.token_ids)
    slot = bad.slot
    for name, pool in engine.rounds.state.tensors.items():
        if name.endswith("gdn_state"):
            pool[slot] = float(kind)
    while not engine.is_idle:
        engine.step()
    assert bad.finish_reason == "error" and isinstance(bad.error, dg.NonFiniteLogitsError)
    assert f"request {bad.id}" in str(bad.error)
    assert bad.token_ids == published == list(expected[3].token_ids[: len(published)])
    assert [engine.result(r) for r in requests[:3]] == expected[:3]
    assert engine.generate(PROMPTS[:4], params) == expected


@pytest.mark.parametrize("draft_tokens", [1, 7, 15])
def test_no_dense_draft_law(draft_tokens: int) -> None:
    """Of a sampled DFlash2 round of the 27B only the verify scores have a vocabulary axis."""
    preset = load_preset("qwen3.5-27b-dflash2")
    pair = ModelPair(
        target_geometry_from_config(preset["target"], "27B"),
        draft_geometry_from_config(preset["draft"], "27B DFlash2"),
        "bfloat16",
    )
    vocab, batch = pair.target.vocab, 2
    declared = declare_round(pair, "eager", draft_tokens=draft_tokens, batch=batch, sampling=True)
    compiled = compile_segments(declared.segments, Capacities(batch, 256))
    wide = {
        value.name: value
        for graph in compiled.graphs
        for value in graph.values.values()
        if value.weight is None and value.role != "state" and vocab in value.spec.shape
    }
    assert [tuple(v.spec.shape) for v in wide.values()] == [(batch, draft_tokens + 1, vocab)]
    dense = batch * draft_tokens * vocab * 4
    offsets = compiled.plan.offsets()
    for graph in compiled.graphs:
        for value in graph.values.values():
            if value.name in offsets and value.name not in wide:
                assert value.spec.nbytes() < dense, value.name
    scores = batch * (draft_tokens + 1) * vocab * 4
    greedy = declare_round(pair, "eager", draft_tokens=draft_tokens, batch=batch)
    plain = compile_segments(greedy.segments, Capacities(batch, 256))
    assert compiled.plan.arena_bytes < plain.plan.arena_bytes + scores + dense // 2
