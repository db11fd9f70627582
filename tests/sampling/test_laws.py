"""Exactness: what speculation emits has plain decoding's law, whatever the law and the draft.

Seeds are fixed, so a right implementation always passes. Had it other seeds, one chi-square
comparison would fail with probability 1e-6, and this file makes about 280: 3e-4 for all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import dflash_graph as dg

Ids = tuple[int, ...]

GOLDEN = Path(__file__).parents[1] / "golden"

LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "top k": {"temperature": 1.0, "top_k": 3},
    "top p": {"temperature": 1.0, "top_p": 0.75},
    "min p": {"temperature": 0.9, "min_p": 0.15},
    "presence": {"temperature": 0.8, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.8, "frequency_penalty": 0.7},
    "all": {
        "temperature": 1.2,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.05,
        "presence_penalty": 0.9,
        "frequency_penalty": -0.4,
    },
}
#: K to (tokens of a request, requests of each law).
PLANS = {0: (2, 160), 1: (3, 200), 3: (4, 280)}
_TEXTS: dict[Any, tuple[dg.Checkpoint, dict[str, list[Ids]], set[int]]] = {}


def texts_of_laws(
    tiny: Any, tools: Any, draft: str | None, draft_tokens: int
) -> tuple[dg.Checkpoint, dict[str, list[Ids]], set[int]]:
    """Texts under each law; the eight rows of every batch obey eight laws."""
    length, count = PLANS[draft_tokens]
    if (draft, draft_tokens) in _TEXTS:
        return _TEXTS[draft, draft_tokens]
    engine = tiny.engine(draft, **({"draft_tokens": draft_tokens} if draft else {}))
    start = tiny.anchored(engine)
    requests: dict[str, list[dg.Request]] = {name: [] for name in LAWS}
    for seed in range(count):
        for index, (name, law) in enumerate(LAWS.items()):
            params = dg.SamplingParams(
                max_new_tokens=length, seed=1000 * index + seed, ignore_eos=True, **law
            )
            requests[name].append(engine.fork(start, params))
    tools.drain(engine)
    accepted = {one.accepted for rs in requests.values() for r in rs for one in r.rounds}
    texts = {name: [tuple(r.token_ids) for r in rs] for name, rs in requests.items()}
    return _TEXTS.setdefault((draft, draft_tokens), (start, texts, accepted))


@pytest.mark.parametrize(
    ("draft", "draft_tokens"),
    [(None, 0), ("dflash", 1), ("dflash", 3), ("dflash2", 1), ("dflash2", 3)],
)
def test_every_law(tiny: Any, tools: Any, draft: str | None, draft_tokens: int) -> None:
    start, texts, accepted = texts_of_laws(tiny, tools, draft, draft_tokens)
    assert accepted == set(range(draft_tokens + 1)), "every acceptance is to occur"
    length, _ = PLANS[draft_tokens]
    for name, law in LAWS.items():
        joint = tiny.oracle.joint((start.anchor,), length, dg.SamplingParams(**law))
        tools.assert_joint(texts[name], joint, f"{draft} K={draft_tokens} {name}")


def test_the_chi_square_notices_another_law(tiny: Any, tools: Any) -> None:
    """The comparison has power: counts that leave out a penalty, or a filter, are refused."""
    start, texts, _ = texts_of_laws(tiny, tools, "dflash2", 1)
    for name, other in (("presence", "temperature"), ("frequency", "temperature"), ("hot", "all")):
        joint = tiny.oracle.joint((start.anchor,), 3, dg.SamplingParams(**LAWS[other]))
        with pytest.raises(AssertionError):
            tools.assert_joint(texts[name], joint, f"{name} as {other}")


def test_first_token(tiny: Any, tools: Any) -> None:
    """The token that prefill chooses, with penalties that have nothing to count yet."""
    engine = tiny.engine("dflash2", draft_tokens=3)
    params = [
        dg.SamplingParams(seed=seed, max_new_tokens=1, **law)
        for seed in range(150)
        for law in (LAWS["temperature"], LAWS["all"])
    ]
    results = engine.generate([tools.prompt] * len(params), params)
    for index, name in enumerate(("temperature", "all")):
        texts = [result.token_ids for result in results[index::2]]
        joint = tiny.oracle.joint((), 1, dg.SamplingParams(**LAWS[name]))
        tools.assert_joint(texts, joint, f"first token, {name}")


@pytest.mark.parametrize("kept", [1, 2])
def test_previews_of_a_fixed_length(tiny: Any, tools: Any, kept: int) -> None:
    """A frontend that keeps fewer, whatever they are, leaves the law as it is."""
    engine = tiny.engine("dflash2", draft_tokens=3)
    start = tiny.anchored(engine)
    requests = [
        engine.fork(
            start,
            dg.SamplingParams(max_new_tokens=3, seed=seed, **LAWS["all"]),
            preview=lambda tokens: min(kept, len(tokens)),
        )
        for seed in range(240)
    ]
    tools.drain(engine)
    joint = tiny.oracle.joint((start.anchor,), 3, dg.SamplingParams(**LAWS["all"]))
    tools.assert_joint([tuple(r.token_ids) for r in requests], joint, f"{kept} kept")


# -- greedy rows with penalties --------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["dflash", "dflash2"])
def test_greedy_penalties(tiny: Any, draft: str) -> None:
    """Token for token plain decoding's, with counts that change inside a block."""
    penalties = [
        {"presence_penalty": p, "frequency_penalty": f}
        for p in (-0.5, 0.0, 0.4, 2.0)
        for f in (-0.3, 0.0, 0.25, 1.0)
    ]
    params = [dg.SamplingParams(max_new_tokens=24, **values) for values in penalties]
    prompts = [(1 + i % 5, 3, i % 6) for i in range(len(params))]
    plain = [r.token_ids for r in tiny.engine(None).generate(prompts, params)]
    assert len(set(plain)) > len(plain) // 2
    accepted = set()
    for draft_tokens in (1, 3, 15):
        results = tiny.engine(draft, draft_tokens=draft_tokens).generate(prompts, params)
        assert [r.token_ids for r in results] == plain, draft_tokens
        accepted |= {one.accepted for r in results for one in r.rounds}
    assert max(accepted) >= 1


@pytest.mark.parametrize("draft", ["dflash_mixed_w16", "dflash2_g16"])
def test_greedy_penalties_where_drafts_are_accepted(draft: str) -> None:
    """Golden prompts, whose drafts are good: penalties turn choices inside long blocks."""
    tensors = load_file(GOLDEN / f"e2e_{draft}" / "expected.safetensors")
    prompts = [tensors[f"prompt{p}.ids"].tolist() for p in range(3)]
    params = [
        dg.SamplingParams(max_new_tokens=32, presence_penalty=p, frequency_penalty=f)
        for p, f in ((0.5, 0.2), (0.0, 0.6))
    ]
    options = dg.EngineOptions(
        device="cpu", lowering="eager", max_context=128, max_batch=3, draft_tokens=7
    )
    texts, accepted = [], set()
    for chosen in (options, options.replace(speculative=False)):
        target = GOLDEN / "target_dense_2x"
        with dg.Engine.load(target, GOLDEN / draft, chosen) as engine:
            results = [engine.generate(prompts, one) for one in params]
        texts.append([r.token_ids for rs in results for r in rs])
        accepted |= {one.accepted for rs in results for r in rs for one in r.rounds}
    assert texts[0] == texts[1] and len(set(texts[0])) > 3
    assert max(accepted) > 3


def test_greedy_penalties_by_the_law(tiny: Any, tools: Any) -> None:
    """The oracle's own argmax chain, counts and all."""
    params = dg.SamplingParams(max_new_tokens=8, presence_penalty=0.4, frequency_penalty=0.25)
    (result,) = tiny.engine("dflash2", draft_tokens=3).generate([tools.prompt], params)
    ((path, chance),) = tiny.oracle.joint((), 8, params).items()
    assert (result.token_ids, chance) == (path, 1.0)
    assert len(set(path)) > 2
