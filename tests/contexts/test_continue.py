"""A request that was stopped and continued gives the tokens of one that was not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.contexts import Checkpoint

Load = Callable[..., dg.Engine]

PAIRS = ("demo dflash", "demo dflash2", "demo plain", "golden mixed", "golden dflash2")
SPECULATIVE = tuple(name for name in PAIRS if "plain" not in name)
LENGTH = 18


def params_of(kind: str, sampled: dg.SamplingParams) -> dg.SamplingParams:
    if kind == "sampled":
        return sampled.replace(max_new_tokens=LENGTH)
    return dg.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)


def check_continuations(
    shop: Any, engine: dg.Engine, run: Any, params: dg.SamplingParams, **more: Any
) -> None:
    """Fork every checkpoint of a run, several at once: same tokens, same rounds."""
    forks = []
    for published, checkpoint in run.checkpoints:
        rest = params.replace(max_new_tokens=LENGTH - published)
        forks.append((published, engine.fork(checkpoint, rest, **more)))
    shop.drain(engine)
    for published, fork in forks:
        assert tuple(fork.token_ids) == run.text[published:], f"after {published} tokens"
        assert fork.rounds == run.rounds_after(published)
        assert fork.finish_reason == run.request.finish_reason


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_round(
    shop: Any, load: Load, sampled: dg.SamplingParams, name: str, kind: str
) -> None:
    """Forks of every round, in company; and checkpoints leave no trace in the run itself."""
    params = params_of(kind, sampled)
    prompt = shop.prompt(name)
    undisturbed = shop.run(load(name), prompt, params)
    engine = load(name, max_batch=3)
    run = shop.run(engine, prompt, params, checkpoints=True)
    assert run.text == undisturbed.text
    assert run.request.rounds == undisturbed.request.rounds
    assert len(run.checkpoints) == len(run.request.rounds) - 1 > 3
    if kind == "greedy":
        assert run.text == shop.plain(name, prompt, LENGTH)
    for published, checkpoint in run.checkpoints:
        history = (*prompt, *run.text[:published])
        assert (*checkpoint.tokens, checkpoint.anchor) == history
        assert checkpoint.generated == run.text[:published]
        assert checkpoint.frontier == len(history) - 1 and checkpoint.rope_delta == 0
    check_continuations(shop, engine, run, params)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("name", SPECULATIVE)
def test_shortened_commits(
    shop: Any, load: Load, sampled: dg.SamplingParams, name: str, kind: str
) -> None:
    """Of rounds that a preview cut: fewer columns are pending than were accepted."""
    params = params_of(kind, sampled)

    def preview(tokens: Sequence[int]) -> int:
        return min(len(tokens), 2)

    engine = load(name, max_batch=3)
    run = shop.run(engine, shop.prompt(name), params, checkpoints=True, preview=preview)
    if kind == "greedy":
        assert any(r.committed < r.licensed for r in run.request.rounds)
    check_continuations(shop, engine, run, params, preview=preview)


@pytest.mark.parametrize("name", SPECULATIVE)
def test_context_catches_up_first(
    shop: Any, load: Load, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the pending columns the draft proposes otherwise; with them, the very same."""
    params = params_of("greedy", dg.SamplingParams())
    engine = load(name, max_batch=1)
    prompt = shop.prompt(name)
    request = engine.submit(prompt, params)
    proposals: list[list[int]] = []
    whole: list[tuple[int, Checkpoint]] = []
    behind: list[tuple[int, Checkpoint]] = []
    executor = engine.rounds[1]
    forward = executor.forward

    def watched(*args: Any, **options: Any) -> Any:
        outputs = forward(*args, **options)
        proposals.append(outputs["verify/ids"][0].tolist())
        return outputs

    monkeypatch.setattr(executor, "forward", watched)
    while not request.is_finished:
        engine.step()
        if request.is_decoding:
            assert request.pending == request.rounds[-1].committed
            with monkeypatch.context() as patch:
                patch.setattr(engine.scheduler, "_catch_up", lambda *_: None)
                behind.append((len(proposals), engine.checkpoint(request)))
            assert request.pending
            whole.append((len(proposals), engine.checkpoint(request)))
            assert request.pending == 0
    expected = list(proposals)
    differ = 0
    for checkpoints in (whole, behind):
        for round_, checkpoint in checkpoints:
            proposals.clear()
            fork = engine.fork(checkpoint, dg.SamplingParams(max_new_tokens=1, ignore_eos=True))
            # One round of full width, whatever the budget is.
            monkeypatch.setattr(
                engine.scheduler, "_live_drafts", lambda r: engine.rounds.draft_tokens
            )
            shop.drain(engine)
            monkeypatch.undo()
            monkeypatch.setattr(executor, "forward", watched)
            assert len(fork.token_ids) == 1
            wide = request.rounds[round_].proposed == engine.rounds.draft_tokens
            if not wide:
                continue
            if checkpoints is whole:
                assert proposals[0] == expected[round_]
            else:
                differ += proposals[0] != expected[round_]
    assert differ, "pending columns should matter to some proposal"


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("name", PAIRS)
def test_after_the_first_token(
    shop: Any, load: Load, sampled: dg.SamplingParams, name: str, kind: str
) -> None:
    """A budget of one ends between prefill and the first round."""
    params = params_of(kind, sampled)
    engine = load(name)
    prompt = shop.prompt(name, 1)
    run = shop.run(engine, prompt, params)
    first = shop.run(engine, prompt, params.replace(max_new_tokens=1), keep=True)
    checkpoint = first.request.checkpoint
    assert checkpoint.tokens == prompt and checkpoint.anchor == run.text[0]
    run.checkpoints = [(1, checkpoint)]
    check_continuations(shop, engine, run, params)


@pytest.mark.parametrize("name", ["demo dflash", "demo plain", "golden mixed"])
def test_kept_at_the_end(shop: Any, load: Load, name: str) -> None:
    """By budget and by stop token, at every length; greedy text goes on as if nothing had ended."""
    engine = load(name, max_batch=3)
    prompt = shop.prompt(name, 2)
    text = shop.plain(name, prompt, LENGTH)
    ended = []
    for count in (1, 2, 5, 8, 12):
        params = dg.SamplingParams(max_new_tokens=count, ignore_eos=True)
        ended.append((count, engine.submit(prompt, params, keep=True)))
        place = text.index(text[count - 1]) + 1  # where this token stops the text first
        params = dg.SamplingParams(stop_token_ids=(text[count - 1],), ignore_eos=True)
        ended.append((place, engine.submit(prompt, params, keep=True)))
    shop.drain(engine)
    assert {request.finish_reason for _, request in ended} == {"length", "stop"}
    forks = []
    for count, request in ended:
        assert tuple(request.token_ids) == text[:count]
        assert request.checkpoint is not None and request.checkpoint.anchor == text[count - 1]
        rest = dg.SamplingParams(max_new_tokens=LENGTH - count, ignore_eos=True)
        forks.append((count, engine.fork(request.checkpoint, rest)))
    shop.drain(engine)
    for count, fork in forks:
        assert tuple(fork.token_ids) == text[count:]


def test_no_context_is_kept_of(shop: Any, load: Load) -> None:
    """A request that was not asked to, that was cancelled, failed, or never had a token."""
    engine = load("golden mixed")
    prompt = shop.prompt("golden mixed")
    params = dg.SamplingParams(max_new_tokens=4, ignore_eos=True)
    assert shop.run(engine, prompt, params).request.checkpoint is None
    cancelled = engine.submit(prompt, params, keep=True)
    engine.step()
    engine.cancel(cancelled)
    assert cancelled.checkpoint is None
    failed = shop.run(engine, prompt, params, keep=True, preview=lambda tokens: -1)
    assert failed.request.finish_reason == "error" and failed.request.checkpoint is None
    nothing = shop.run(engine, prompt, params, keep=True, preview=lambda tokens: 0)
    assert nothing.request.finish_reason == "stop" and nothing.text == ()
    assert nothing.request.checkpoint is None, "there is no anchor to go on from"


def test_kept_where_a_preview_ended_it(shop: Any, load: Load) -> None:
    """N = 0 in a later round: the context is that of the round before."""
    engine = load("golden mixed")
    prompt = shop.prompt("golden mixed")
    text = shop.plain("golden mixed", prompt, LENGTH)
    calls: list[int] = []

    def preview(tokens: Sequence[int]) -> int:
        calls.append(len(tokens))
        return 0 if len(calls) == 4 else len(tokens)

    params = dg.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    run = shop.run(engine, prompt, params, keep=True, preview=preview)
    count = sum(calls[:3])
    assert run.text == text[:count] and run.request.checkpoint is not None
    assert run.request.checkpoint.generated == text[:count]
    rest = params.replace(max_new_tokens=LENGTH - count)
    fork = engine.fork(run.request.checkpoint, rest)
    shop.drain(engine)
    assert tuple(fork.token_ids) == text[count:]


@pytest.mark.parametrize("name", ["demo dflash2", "golden mixed", "demo plain"])
def test_chain_of_forks(shop: Any, load: Load, name: str) -> None:
    """Checkpoint, fork a few tokens, checkpoint that, and so on: still one text, one count."""
    engine = load(name)
    prompt = shop.prompt(name)
    text = shop.plain(name, prompt, LENGTH + 3)
    one = dg.SamplingParams(max_new_tokens=3, ignore_eos=True)
    request = shop.run(engine, prompt, one, keep=True).request
    done = list(request.token_ids)
    while len(done) < LENGTH:
        request = engine.fork(request.checkpoint.to_host(), one, keep=True)
        shop.drain(engine)
        done += request.token_ids
        assert request.checkpoint.generated == text[: len(done)]
    assert tuple(done) == text[: len(done)]


def test_other_params(shop: Any, load: Load, sampled: dg.SamplingParams) -> None:
    """A context does not remember how it was sampled, only what was generated."""
    engine = load("demo dflash2", max_batch=3)
    prompt = shop.prompt("demo dflash2")
    greedy = dg.SamplingParams(max_new_tokens=12, ignore_eos=True)
    kept = shop.run(engine, prompt, greedy, keep=True).request
    drawn = sampled.replace(max_new_tokens=16)
    penalized = greedy.replace(presence_penalty=2.0, frequency_penalty=1.0)
    forks = [engine.fork(kept.checkpoint, p) for p in (drawn, penalized, greedy, drawn, penalized)]
    counts = []
    while not engine.is_idle:
        engine.step()
        for fork in forks:
            if fork.is_decoding and fork.is_admitted and not fork.is_plain_greedy:
                row = engine.rounds.state.tensors["target.token_counts"][fork.slot]
                expected = torch.bincount(torch.tensor(fork.generated), minlength=row.numel())
                counts.append(torch.equal(row.long(), expected))
    assert counts and all(counts)
    texts = [tuple(fork.token_ids) for fork in forks]
    assert texts[0] == texts[3] and texts[1] == texts[4]
    assert texts[2] == shop.plain("demo dflash2", prompt, 24)[12:]
    assert len(set(texts[:3])) == 3
    # The penalized text is what one request gives which generated the twelve tokens itself.
    assert texts[1] == penalized_text(shop, prompt, kept.token_ids, penalized)


def penalized_text(
    shop: Any, prompt: tuple[int, ...], first: list[int], params: dg.SamplingParams
) -> tuple[int, ...]:
    """Twelve forced tokens, then twelve by the law, from scores of plain decoding."""
    engine = shop.load("demo plain", max_batch=1)
    vocab = engine.rounds.model.pair.emitted_vocab
    head = next(
        tensor
        for use, tensor in engine.rounds.model.weights.items()
        if use.parts == ("target/lm_head.weight",)
    )
    generated = list(first)
    while len(generated) < 24:
        ids = (*prompt, *generated)
        probe = engine.submit(ids, dg.SamplingParams(max_new_tokens=1, ignore_eos=True), keep=True)
        shop.drain(engine)
        hidden = probe.checkpoint.images["target.continuation_hidden"]
        scores = (head.float() @ hidden.float())[:vocab]
        counts = torch.bincount(torch.tensor(generated), minlength=vocab)[:vocab]
        scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        generated.append(int(scores.argmax()))
    return tuple(generated[12:])


@pytest.mark.parametrize("draft_tokens", [1, 9, 15])
def test_other_width(shop: Any, load: Load, draft_tokens: int) -> None:
    """An engine with another K takes it: the block's width is no part of a context."""
    engine = load("golden mixed")
    prompt = shop.prompt("golden mixed")
    text = shop.plain("golden mixed", prompt, LENGTH)
    params = dg.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    run = shop.run(engine, prompt, params, checkpoints=True)
    other = load("golden mixed", draft_tokens=draft_tokens, max_batch=4, max_context=128)
    for published, checkpoint in run.checkpoints:
        fork = other.restore(
            checkpoint.to_host(), params.replace(max_new_tokens=LENGTH - published)
        )
        shop.drain(other)
        assert tuple(fork.token_ids) == text[published:]


def test_multimodal_context(shop: Any, load: Load, rng: torch.Generator) -> None:
    """Rotary positions go on from the prompt's maximum, in a fork as in the request."""
    engine = load("demo dflash2")
    prompt = shop.prompt("demo dflash2", 2)
    hidden = engine.rounds.model.pair.target.hidden
    rows = {i: torch.randn(hidden, generator=rng) * 0.05 for i in range(2, 6)}
    positions = torch.arange(len(prompt)).expand(3, -1).clone()
    positions[1:, 2:6] += 3
    positions[:, 6:] += 5
    params = dg.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    run = shop.run(engine, prompt, params, checkpoints=True, embeddings=rows, positions=positions)
    assert {c.rope_delta for _, c in run.checkpoints} == {5}
    check_continuations(shop, engine, run, params)
    # A fork of a fork keeps it too.
    published, checkpoint = run.checkpoints[1]
    fork = engine.fork(checkpoint, params.replace(max_new_tokens=3), keep=True)
    shop.drain(engine)
    assert fork.checkpoint is not None and fork.checkpoint.rope_delta == 5
    rest = params.replace(max_new_tokens=LENGTH - published - 3)
    last = engine.fork(fork.checkpoint, rest)
    shop.drain(engine)
    assert tuple(last.token_ids) == run.text[published + 3 :]


def test_when_no_checkpoint_can_be_taken(shop: Any, load: Load) -> None:
    """Waiting, in prefill, ended, another engine's, inside a preview, closed: nothing changes."""
    engine = load("golden mixed", max_batch=1, prefill_chunk=16)
    other = load("golden mixed", max_batch=1)
    prompt = shop.prompt("golden mixed", 2)
    assert len(prompt) > 32
    params = dg.SamplingParams(max_new_tokens=8, ignore_eos=True)
    errors: list[str] = []

    def preview(tokens: Sequence[int]) -> int:
        with pytest.raises(dg.RequestError) as caught:
            engine.checkpoint(request)
        errors.append(str(caught.value))
        return len(tokens)

    request = engine.submit(prompt, params, preview=preview)
    waiting = engine.submit(prompt, params)
    for _ in range(2):
        for refused in (request, waiting):
            with pytest.raises(dg.RequestError, match="decoding"):
                engine.checkpoint(refused)
        engine.step()
    assert request.is_prefilling
    with pytest.raises(dg.RequestError, match="another engine"):
        other.checkpoint(request)
    shop.drain(engine)
    assert errors and all("decoding" in error for error in errors)
    text = shop.plain("golden mixed", prompt, 8)
    assert tuple(request.token_ids) == tuple(waiting.token_ids) == text
    with pytest.raises(dg.RequestError, match="keep=True"):
        engine.checkpoint(request)
    other.close()
    with pytest.raises(dg.EngineClosedError):
        other.checkpoint(request)


def test_stop_strings_across_a_fork(shop: Any, load: Load) -> None:
    """A stop string that begins before the checkpoint and ends behind it ends the fork as well."""
    name = "demo dflash2"
    engine = load(name)
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = shop.prompt(name, 2)
    params = dg.SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)
    run = shop.run(engine, prompt, params, checkpoints=True)
    whole = tokenizer.decode(run.text)
    straddled = 0
    for published, checkpoint in run.checkpoints:
        border = len(tokenizer.decode(run.text[:published]))
        for begin, end in (
            (border - 3, border + 2),
            (border - 1, border + 1),
            (border, border + 3),
        ):
            stop = whole[begin:end]
            if begin < 0 or len(stop) < end - begin or whole.find(stop) < begin:
                continue
            stopped = params.replace(stop=(stop,))
            expected = shop.run(engine, prompt, stopped)
            assert expected.request.finish_reason == "stop"
            rest = stopped.replace(max_new_tokens=LENGTH - published)
            fork = engine.fork(checkpoint, rest)
            shop.drain(engine)
            assert fork.finish_reason == "stop"
            assert tuple(fork.token_ids) == expected.text[published:]
            text = engine.result(expected.request).text
            assert text is not None
            assert engine.result(fork).text == text[border:]
            straddled += begin < border
            # One that was complete before is no reason to end.
            before = whole[border - 2 : border]
            if begin == border and before not in whole[border - 1 :]:
                fork = engine.fork(checkpoint, rest.replace(stop=(before, "\0" * 9)))
                shop.drain(engine)
                assert tuple(fork.token_ids) == run.text[published:]
    assert straddled
