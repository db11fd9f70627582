"""What goes wrong stays with its request: bad submissions, non-finite logits, interruptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.executors import Executor
from dflash_graph.lowering.segment import Segment

Load = Callable[..., dg.Engine]

PAIRS = ("dflash_mixed_w16", "dflash2_g16")


def long(count: int = 48) -> dg.SamplingParams:
    return dg.SamplingParams(max_new_tokens=count)


# -- submission ------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty": ((), "at least one token"),
    "too long": ([1] * 64, "fewer than 64"),
    "far too long": ([1] * 1000, "fewer than 64"),
    "past the vocabulary": ([1, 2, 160], r"prompt\[2\].*0\.\.159.*160"),
    "negative": ([-1, 2], r"prompt\[0\].*-1"),
    "huge": ([2**40], r"prompt\[0\]"),
    "bool": ([1, True], r"prompt\[1\].*True"),
    "float": ([1, 2.0], r"prompt\[1\].*2\.0"),
    "none": ([None], r"prompt\[0\].*None"),
    "nested": ([[1, 2]], r"prompt\[0\]"),
    "tensor": (torch.tensor([1, 2]), r"prompt\[0\]"),
    "text": ("import os", "tokenizer"),
    "empty text": ("", "tokenizer"),
    "not a sequence": (5, "prompt"),
    "nothing": (None, "prompt"),
    "bytes": (b"import", "prompt"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_bad_prompt(load: Load, kind: str) -> None:
    engine = load("dflash2_g16", max_context=64)
    prompt, message = BAD_PROMPTS[kind]
    for call in (
        lambda: engine.submit(prompt),
        lambda: engine.generate([prompt]),
        lambda: engine.generate([[1, 2], prompt]),
    ):
        with pytest.raises(dg.RequestError, match=message):
            call()
        assert engine.is_idle and engine.step() == []
    assert engine.submit([1]).id == 0, "no number was used up"
    engine.cancel(engine.scheduler.waiting[0])


def test_empty_text(load: Load) -> None:
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=64)
    with dg.Engine.demo(options) as engine, pytest.raises(dg.RequestError, match="at least one"):
        engine.submit("")


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "stop token": ({"stop_token_ids": (3, 160)}, r"stop_token_ids.*below 160.*160"),
    "stop strings without a tokenizer": ({"stop": ("x",)}, "no tokenizer.json"),
}


@pytest.mark.parametrize("kind", BAD_PARAMS)
def test_bad_params(load: Load, kind: str) -> None:
    engine = load("dflash2_g16")
    values, message = BAD_PARAMS[kind]
    params = dg.SamplingParams(**values)
    for call in (
        lambda: engine.submit([1, 2], params),
        lambda: engine.generate([[1, 2], [1]], [dg.SamplingParams(), params]),
    ):
        with pytest.raises(dg.RequestError, match=message):
            call()
        assert engine.is_idle and engine.step() == []


def test_count_of_params(load: Load) -> None:
    engine = load("dflash2_g16")
    for count in (0, 1, 3):
        with pytest.raises(
            dg.RequestError, match=rf"params: expected one for all or 2, got {count}"
        ):
            engine.generate([[1], [2]], [dg.SamplingParams()] * count)
    assert engine.is_idle and engine.step() == []
    assert engine.generate([]) == [] and engine.generate([], []) == []


BAD_CALLS: dict[str, tuple[Callable[[dg.Engine], Any], type[Exception], str]] = {
    "one text": (lambda e: e.generate("abc"), dg.RequestError, "list of prompts"),
    "one prompt of bytes": (lambda e: e.generate(b"abc"), dg.RequestError, "list of prompts"),
    "no prompts": (lambda e: e.generate(5), dg.RequestError, "list of prompts"),
    "prompt by prompt": (lambda e: e.generate([1, 2]), dg.RequestError, "prompt"),
    "params of another kind": (lambda e: e.generate([[1]], 5), dg.RequestError, "SamplingParams"),
    "params of a mapping": (
        lambda e: e.submit([1], {"temperature": 0.0}),
        dg.RequestError,
        "SamplingParams",
    ),
    "a set": (lambda e: e.submit({1, 2}), dg.RequestError, "prompt"),
    "a mapping": (lambda e: e.submit({1: 2}), dg.RequestError, "prompt"),
    "preview": (lambda e: e.submit([1], preview=5), dg.RequestError, "preview"),
    "fork of nothing": (lambda e: e.fork(None), dg.ContextError, "Checkpoint"),
    "cancel of nothing": (lambda e: e.cancel(None), dg.RequestError, "submit"),
    "stream of nothing": (lambda e: e.stream(None), dg.RequestError, "submit"),
    "result of nothing": (lambda e: e.result(None), dg.RequestError, "submit"),
    "checkpoint of nothing": (lambda e: e.checkpoint(None), dg.RequestError, "submit"),
    "context before the first": (lambda e: e.profile(context=-1), dg.OptionError, "context"),
}


@pytest.mark.parametrize("kind", BAD_CALLS)
def test_bad_call(load: Load, kind: str) -> None:
    engine = load("dflash2_g16")
    call, error, message = BAD_CALLS[kind]
    with pytest.raises(error, match=message):
        call(engine)
    assert engine.is_idle and engine.step() == []


def test_prompts_of_any_iterable(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    results = load("dflash2_g16").generate(iter(case.prompts), iter([long()] * 3))
    assert tuple(result.token_ids for result in results) == case.greedy


def test_text_with_half_a_character() -> None:
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=64)
    with dg.Engine.demo(options) as engine, pytest.raises(dg.RequestError, match="at 7"):
        engine.submit("import \udcff")


def test_options_of_another_kind(lab: Any) -> None:
    case = lab.case("dflash2_g16")
    options: Any = {"max_batch": 1}
    with pytest.raises(dg.OptionError, match="EngineOptions"):
        dg.Engine.load(case.target, case.draft, options)


def test_options_that_contradict_the_model(lab: Any) -> None:
    """What shapes graphs was fixed when the model was loaded."""
    case = lab.case("dflash2_g16")
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=64)
    model = dg.Model.load(case.target, case.draft, options)
    for changes in (
        {"dtype": "bfloat16"},
        {"speculative": False},
        {"public_vocab": 10},
        {"draft_causality": "sliding"},
        {"draft_tree": 12},
    ):
        with pytest.raises(dg.OptionError, match=next(iter(changes))):
            dg.compile_rounds(model, options.replace(**changes))
    rounds = dg.compile_rounds(model, options)
    assert 1 in rounds and 2 not in rounds and "1" not in rounds
    assert rounds.get(1) is rounds[1] and rounds.get(2) is None
    with pytest.raises(dg.OptionError, match="got 2"):
        rounds[2]


def test_bad_submission_beside_running_requests(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=2)
    requests = [engine.submit(prompt, long()) for prompt in case.prompts]
    while not engine.is_idle:
        engine.step()
        with pytest.raises(dg.RequestError):
            engine.submit([])
        with pytest.raises(dg.RequestError):
            engine.generate([[1], [160]])
    assert tuple(tuple(r.token_ids) for r in requests) == case.greedy


def test_result_of_a_running_request(lab: Any, load: Load) -> None:
    engine = load("dflash2_g16")
    request = engine.submit(lab.case("dflash2_g16").prompts[0], long())
    for _ in range(2):
        with pytest.raises(dg.RequestError, match=f"request {request.id}: not finished"):
            engine.result(request)
        engine.step()
    engine.cancel(request)
    assert engine.result(request).finish_reason == "cancelled"


def test_request_of_another_engine(lab: Any, load: Load) -> None:
    """It is refused instead of being waited for without end; nothing of either engine changes."""
    case = lab.case("dflash2_g16")
    mine, other = load("dflash2_g16"), load("dflash2_g16")
    request = other.submit(case.prompts[0], long())
    with pytest.raises(dg.RequestError, match="another engine"):
        mine.cancel(request)
    with pytest.raises(dg.RequestError, match="another engine"):
        next(mine.stream(request))
    assert request.finish_reason is None and not other.is_idle
    while not other.is_idle:
        other.step()
    assert tuple(request.token_ids) == case.greedy[0]


# -- non-finite logits -----------------------------------------------------------------------------


def spoil(engine: dg.Engine, request: dg.Request, pool: str, value: float) -> None:
    """Overwrite what a request holds in one pool."""
    state = engine.rounds.state.tensors[pool]
    for unit in request.pages if pool.endswith("pages") else [request.slot]:
        state[unit] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("name", PAIRS)
def test_non_finite_target_state(
    lab: Any, load: Load, name: str, victim: int, value: float
) -> None:
    """The request whose state is spoilt fails by name and publishes nothing; the others go on."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=3)
    pools = [p for p in engine.rounds.state.tensors if p.startswith("target.layers.")]
    assert {p.rpartition(".")[2] for p in pools} == {
        "gdn_state",
        "conv_history",
        "k_pages",
        "v_pages",
    }
    for pool in (pools[0], pools[1], pools[-1], pools[-2]):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        while min(len(r.token_ids) for r in requests) < 3:
            engine.step()
        published = list(requests[victim].token_ids)
        spoil(engine, requests[victim], pool, value)
        engine.step()
        failed = requests[victim]
        assert failed.finish_reason == "error", pool
        assert isinstance(failed.error, dg.NonFiniteLogitsError)
        assert f"request {failed.id}" in str(failed.error)
        assert failed.token_ids == published
        assert failed.rounds[-1].committed == 0
        while not engine.is_idle:
            engine.step()
        for index, request in enumerate(requests):
            if index != victim:
                assert tuple(request.token_ids) == case.greedy[index], pool
    results = engine.generate(case.prompts, long())
    assert tuple(result.token_ids for result in results) == case.greedy


def test_non_finite_first_token(lab: Any, load: Load) -> None:
    """State that breaks during prefill: no token at all, and the slot serves the next request."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", prefill_chunk=16, max_batch=2)
    other = engine.submit(case.prompts[0], long())
    engine.step()
    request = engine.submit(case.prompts[2], long())
    engine.step()
    assert 0 < request.frontier < len(request.prompt)
    spoil(engine, request, "target.layers.0.gdn_state", float("nan"))
    while not engine.is_idle:
        engine.step()
    assert request.finish_reason == "error" and request.token_ids == [] and request.rounds == []
    assert isinstance(request.error, dg.NonFiniteLogitsError)
    assert tuple(other.token_ids) == case.greedy[0]
    assert engine.generate([case.prompts[2]], long())[0].token_ids == case.greedy[2]


@pytest.mark.parametrize("name", PAIRS)
def test_non_finite_draft_state(lab: Any, load: Load, name: str) -> None:
    """A draft that proposes from NaN costs rounds; the text is the target's."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=3)
    for value in (float("nan"), float("inf")):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        while not engine.is_idle:
            for request in requests[1:2]:
                for pool in engine.rounds.state.tensors:
                    if pool.startswith("draft.") and request.is_decoding:
                        spoil(engine, request, pool, value)
            engine.step()
        assert tuple(tuple(r.token_ids) for r in requests) == case.greedy
        results = engine.generate(case.prompts, long())
        assert tuple(result.token_ids for result in results) == case.greedy


# -- interruptions ---------------------------------------------------------------------------------


def interrupt_once(executor: Executor, index: int, launches: int) -> None:
    """Let the next run of a segment stop after some launches, as Ctrl-C would."""
    segment = executor.segments[index]
    part = Segment(segment.schedule, segment.launches[:launches])

    def run(chosen: int = 0, probe: Any = None, meanwhile: Any = None) -> None:
        if chosen != index:
            return Executor.run(executor, chosen, probe)
        del executor.run  # type: ignore[method-assign]
        part.run(probe)
        raise KeyboardInterrupt

    executor.run = run  # type: ignore[method-assign]


def points(rng: torch.Generator, executor: Executor, index: int, count: int) -> list[int]:
    """The first and last place to stop in a segment, and some between."""
    last = len(executor.segments[index].launches)
    return [0, last, *torch.randint(last, (count,), generator=rng).tolist()]


@pytest.mark.parametrize("name", PAIRS)
def test_interrupted_forward(lab: Any, load: Load, rng: torch.Generator, name: str) -> None:
    """Until its commit a round has changed nothing: stepping on gives the same text."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=3)
    expected = engine.generate(case.prompts, long())
    for launches in points(rng, engine.rounds[3], 0, 6):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        while min(len(r.token_ids) for r in requests) < 4:
            engine.step()
        interrupt_once(engine.rounds[3], 0, launches)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while not engine.is_idle:
            engine.step()
        assert [r.token_ids for r in requests] == [list(e.token_ids) for e in expected]


@pytest.mark.parametrize("name", PAIRS)
def test_interrupted_prefill(lab: Any, load: Load, rng: torch.Generator, name: str) -> None:
    """A chunk that stopped half-way has moved some layers' state: the prompt starts again."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=2, prefill_chunk=16)
    for launches in points(rng, engine.rounds.prefill(16), 0, 6):
        other = engine.submit(case.prompts[0], long())
        engine.step()
        request = engine.submit(case.prompts[2], long())
        engine.step()
        assert request.frontier == 16
        interrupt_once(engine.rounds.prefill(16), 0, launches)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while not engine.is_idle:
            engine.step()
        assert tuple(request.token_ids) == case.greedy[2], launches
        assert tuple(other.token_ids) == case.greedy[0]


def test_interrupted_choice_of_the_first_token(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    for launches in (0, 1, 2):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        interrupt_once(engine.rounds.first_token, 0, launches)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while not engine.is_idle:
            engine.step()
        assert tuple(tuple(r.token_ids) for r in requests) == case.greedy


@pytest.mark.parametrize("name", PAIRS)
def test_interrupted_commit(lab: Any, load: Load, rng: torch.Generator, name: str) -> None:
    """State that no frontier describes is given up: only the round's requests fail, by name."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=2)
    for launches in points(rng, engine.rounds[2], 1, 2):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        while not all(r.token_ids for r in requests[:2]):
            engine.step()
        interrupt_once(engine.rounds[2], 1, launches)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        for index in (0, 1):
            failed = requests[index]
            assert failed.finish_reason == "error" and isinstance(failed.error, dg.RequestError)
            assert tuple(failed.token_ids) == case.greedy[index][: len(failed.token_ids)]
        events = engine.step()
        assert {e.request_id for e in events if e.finish_reason == "error"} == {
            r.id for r in requests[:2]
        }
        while not engine.is_idle:
            engine.step()
        assert tuple(requests[2].token_ids) == case.greedy[2]


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("caller", [0, 1, 2])
def test_interrupted_preview(lab: Any, load: Load, caller: int, calls: int) -> None:
    """Ctrl-C in a callback: the round is done again, with every preview asked again."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=3)
    seen: list[int] = []

    def preview(tokens: Any) -> int:
        seen.append(len(tokens))
        if len(seen) == calls:
            raise KeyboardInterrupt
        return len(tokens)

    requests = [
        engine.submit(prompt, long(), preview=preview if index == caller else None)
        for index, prompt in enumerate(case.prompts)
    ]
    events: list[dg.Event] = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            events += engine.step()
    while not engine.is_idle:
        events += engine.step()
    assert tuple(tuple(r.token_ids) for r in requests) == case.greedy
    for request in requests:
        mine = [t for e in events if e.request_id == request.id for t in e.token_ids]
        assert mine == request.token_ids


def test_interruption_forgets_a_bad_preview(lab: Any, load: Load) -> None:
    """A failed preview of an interrupted round fails nothing if it does well the next time."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    calls = {"bad": 0}
    interrupted: list[bool] = []

    def bad(tokens: Any) -> int:
        calls["bad"] += 1
        if calls["bad"] == 3:
            raise ValueError
        return len(tokens)

    def interrupts(tokens: Any) -> int:
        if calls["bad"] == 3 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return len(tokens)

    requests = [
        engine.submit(prompt, long(), preview=preview)
        for prompt, preview in zip(case.prompts, (bad, interrupts), strict=False)
    ]
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert not any(r.is_finished for r in requests)
    while not engine.is_idle:
        engine.step()
    assert [r.error for r in requests] == [None, None]
    assert tuple(tuple(r.token_ids) for r in requests) == case.greedy[:2]


def test_interrupted_generate(lab: Any, load: Load) -> None:
    """`generate` takes its requests back; those of others go on."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    other = engine.submit(case.prompts[0], long())
    engine.step()
    interrupt_once(engine.rounds[2], 0, 5)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(case.prompts[1:] * 3, long())
    assert engine.scheduler.active == [other] and not engine.scheduler.waiting
    while not engine.is_idle:
        engine.step()
    assert tuple(other.token_ids) == case.greedy[0]


def test_interrupted_admission(lab: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a slot that was not cleared yet: it goes on, or is cancelled, cleanly."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)

    def reset(slot: int) -> None:
        raise KeyboardInterrupt

    for cancelled in (None, 0, 1):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        with monkeypatch.context() as patch:
            patch.setattr(engine.rounds.state, "reset_slot", reset)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        if cancelled is not None:
            engine.cancel(requests[cancelled])
        while not engine.is_idle:
            engine.step()
        for index, request in enumerate(requests):
            expected = () if index == cancelled else case.greedy[index]
            assert tuple(request.token_ids) == expected


@pytest.mark.parametrize("where", ["_account", "_publish"])
def test_interrupted_accounting(
    lab: Any, load: Load, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Committed, but not accounted for: the one request fails by name, the others go on."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=3)
    first = engine.submit(case.prompts[0], long())
    while len(first.token_ids) < 2:
        engine.step()
    others = [engine.submit(prompt, long()) for prompt in case.prompts[1:]]
    while not all(request.token_ids for request in others):
        engine.step()
    whole = getattr(engine.scheduler, where)

    def halfway(request: dg.Request, *rest: Any) -> None:
        if request is first:
            request.history.append(0)
            raise KeyboardInterrupt
        whole(request, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.scheduler, where, halfway)
        engine.step()
    assert first.finish_reason == "error" and isinstance(first.error, dg.RequestError)
    assert isinstance(first.error.__cause__, KeyboardInterrupt)
    while not engine.is_idle:
        engine.step()
    assert tuple(tuple(request.token_ids) for request in others) == case.greedy[1:]


#: Where a call can find an engine inside a step: the owner of a function, and its name.
MOMENTS: dict[str, Callable[[dg.Engine], tuple[Any, str]]] = {
    "admission": lambda engine: (engine.scheduler, "_install"),
    "tables": lambda engine: (engine.scheduler, "_tables"),
    "prefill": lambda engine: (engine.rounds.prefill(16), "run"),
    "first token": lambda engine: (engine.rounds.first_token, "run"),
    "publication": lambda engine: (engine.scheduler, "_publish"),
    "forward": lambda engine: (engine.rounds[2], "forward"),
    "finish": lambda engine: (engine.rounds[2], "finish"),
}


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("moment", MOMENTS)
def test_cancel_by_a_signal_handler(
    lab: Any,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    after: bool,
    victim: int,
) -> None:
    """It runs on the thread that steps, inside the step, before a call or after it."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2, prefill_chunk=16)
    owner, name = MOMENTS[moment](engine)
    inner = getattr(owner, name)
    for calls in (1, 2, 4):
        requests = [engine.submit(prompt, long()) for prompt in case.prompts]
        left, asked = calls, False

        def cancel(victim: dg.Request = requests[victim]) -> None:
            nonlocal asked
            asked = not victim.is_finished
            engine.cancel(victim)

        def interrupted(*given: Any, cancel: Callable[[], None] = cancel, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0 and not after:
                cancel()
            result = inner(*given, **named)
            if left == 0 and after:
                cancel()
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            while not engine.is_idle:
                engine.step()
        for index, request in enumerate(requests):
            if index != victim or not asked:
                assert tuple(request.token_ids) == case.greedy[index]
            else:
                # It was cancelled, or ended by itself in that very step.
                assert request.finish_reason in ("cancelled", "length")
                assert tuple(request.token_ids) == case.greedy[index][: len(request.token_ids)]


def test_close_by_a_signal_handler(lab: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    requests = [engine.submit(prompt, long()) for prompt in lab.case("dflash2_g16").prompts]
    tables = engine.scheduler._tables

    def closing(*given: Any) -> Any:
        engine.close()
        return tables(*given)

    monkeypatch.setattr(engine.scheduler, "_tables", closing)
    engine.step()
    assert [request.finish_reason for request in requests] == ["cancelled"] * 3
    assert engine.is_idle
    with pytest.raises(dg.EngineClosedError):
        engine.step()


# -- failures --------------------------------------------------------------------------------------


def failing(index: int = 0, probe: Any = None, meanwhile: Any = None) -> None:
    """In the place of Executor.run."""
    raise RuntimeError("device")


def test_failing_round(lab: Any, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the device is the caller's to see; afterwards the engine goes on."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="device"):
        patch.setattr(engine.rounds[1], "run", failing)
        engine.generate([case.prompts[0]], long())
    assert engine.is_idle
    assert engine.generate([case.prompts[0]], long())[0].token_ids == case.greedy[0]


@pytest.mark.parametrize("stage", ["prefill", "first token", "admission"])
def test_failing_prefill(lab: Any, load: Load, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """However often it fails, the request that it was for ends by name, and all others go on."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    other = engine.submit(case.prompts[0], long())
    while len(other.token_ids) < 2:
        engine.step()
    with monkeypatch.context() as patch:
        if stage == "admission":
            patch.setattr(engine.rounds.state, "reset_slot", failing)
        else:
            prefill = engine.rounds.prefill(len(case.prompts[1]))
            executor = prefill if stage == "prefill" else engine.rounds.first_token
            patch.setattr(executor, "run", failing)
        failed = engine.generate([case.prompts[1]] * 2, long())
    for result in failed:
        assert result.finish_reason == "error" and result.token_ids == ()
        assert isinstance(result.error, dg.RequestError) and "device" in str(result.error)
        assert isinstance(result.error.__cause__, RuntimeError)
    while not engine.is_idle:
        engine.step()
    assert tuple(other.token_ids) == case.greedy[0]
    assert engine.generate([case.prompts[1]], long())[0].token_ids == case.greedy[1]
