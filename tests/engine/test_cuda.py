"""The demo pair on a CUDA device, through the lowerings that run there today."""

from __future__ import annotations

from pathlib import Path

import pytest

import dflash_graph as dg

pytestmark = pytest.mark.gpu

TOKENS = 64


def load(lowering: str, *, speculative: bool = True, device: str = "cuda") -> dg.Engine:
    options = dg.EngineOptions(
        device=device,
        dtype="float32",
        lowering=lowering,
        max_batch=3,
        max_context=512,
        speculative=speculative,
    )
    return dg.Engine.demo(options)


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
