"""The demo pair on its 20 prompts: plain decoding's text, and tokens a round as its card states."""

from __future__ import annotations

import pytest

import dflash_graph as dg

NEW_TOKENS = 128

#: Tokens a round, greedy float32, blocks of 8 and 16 (`dflash_graph/demo/DATA_CARD.md`,
#: "Acceptance"). The token that prefill chooses is in no round and does not count.
TOKENS_PER_ROUND = {
    ("dflash", 7): 3.52,
    ("dflash", 15): 3.75,
    ("dflash2", 7): 4.85,
    ("dflash2", 15): 5.46,
}

TOLERANCE = 0.02


def generate(**options: object) -> list[dg.Generation]:
    draft = options.pop("draft", "dflash2")
    options = {"max_batch": 8, "max_context": 384, "device": "cpu", "lowering": "eager"} | options
    with dg.Engine.demo(dg.EngineOptions(**options), draft=draft) as engine:
        return engine.generate(dg.demo.prompts(), dg.SamplingParams(max_new_tokens=NEW_TOKENS))


@pytest.fixture(scope="module")
def plain() -> list[dg.Generation]:
    return generate(speculative=False)


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "draft_tokens"), TOKENS_PER_ROUND)
def test_speculation(plain: list[dg.Generation], draft: str, draft_tokens: int) -> None:
    results = generate(draft=draft, draft_tokens=draft_tokens)
    assert len(results) == 20
    equal = [r.token_ids == p.token_ids for r, p in zip(results, plain, strict=True)]
    assert all(equal), f"{sum(equal)} of 20 equal"
    assert [r.text for r in results] == [p.text for p in plain]
    assert [r.finish_reason for r in results] == [p.finish_reason for p in plain]
    rounds = sum(len(r.rounds) for r in results)
    tokens = sum(len(r.token_ids) - 1 for r in results)
    assert tokens == sum(one.committed for r in results for one in r.rounds)
    stated = TOKENS_PER_ROUND[draft, draft_tokens]
    assert tokens / rounds == pytest.approx(stated, rel=TOLERANCE)


@pytest.mark.slow
def test_company_and_chunks(plain: list[dg.Generation]) -> None:
    """Some prompts alone and in small chunks: the texts of the batch of eight."""
    for draft, batch, chunk in (("dflash", 1, 33), ("dflash2", 2, 7)):
        options = dg.EngineOptions(
            device="cpu", lowering="eager", max_batch=batch, max_context=384, prefill_chunk=chunk
        )
        with dg.Engine.demo(options, draft=draft) as engine:  # type: ignore[arg-type]
            texts = dg.demo.prompts()[3:5]
            results = engine.generate(texts, dg.SamplingParams(max_new_tokens=32))
        assert [r.token_ids for r in results] == [p.token_ids[:32] for p in plain[3:5]]
