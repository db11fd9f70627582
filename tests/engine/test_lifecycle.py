"""Requests from submission to their end: joining, cancelling, previews, streams, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dflash_graph as dg

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]

PAIRS = ("dflash_mixed_w16", "dflash2_g16")


def drain(engine: dg.Engine) -> list[dg.Event]:
    events: list[dg.Event] = []
    while not engine.is_idle:
        events += engine.step()
    return events


def long(count: int = 48, **more: Any) -> dg.SamplingParams:
    return dg.SamplingParams(max_new_tokens=count, **more)


# -- joining and leaving ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_more_prompts_than_slots(lab: Any, load: Load, random_ids: Any, name: str) -> None:
    """Results stand in the order of the prompts, whichever ended first."""
    engine = load(name, max_batch=3)
    vocab = lab.case(name).vocab
    prompts = [random_ids(length, vocab) for length in (40, 1, 9, 70, 3, 22, 5, 64, 2, 17)]
    budgets = (20, 3, 1, 9, 17, 2, 30, 6, 12, 1)
    results = engine.generate(prompts, [long(n) for n in budgets])
    for prompt, budget, result in zip(prompts, budgets, results, strict=True):
        assert result.token_ids == lab.plain(name, prompt, budget)


@pytest.mark.parametrize("name", PAIRS)
def test_random_schedule(
    lab: Any, load: Load, rng: torch.Generator, random_ids: Any, name: str
) -> None:
    """Requests come, choose and are cancelled at random: texts are prefixes of plain decoding's."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=rng))

    case = lab.case(name)
    engine = load(name, draft_tokens=6, max_batch=4, prefill_chunk=16, max_context=160)

    def some_tokens(tokens: Sequence[int]) -> int:
        return len(tokens) if below(2) else 1 + below(len(tokens))

    requests: list[dg.Request] = []
    for _ in range(40):
        if below(2) and len(requests) < 24:
            cut, fresh = case.cut(below(3), below(40))[0], random_ids(1 + below(80), case.vocab)
            preview = some_tokens if below(2) else None
            prompt = fresh if below(2) else cut
            requests.append(engine.submit(prompt, long(1 + below(30)), preview=preview))
        if requests and not below(6):
            engine.cancel(requests[below(len(requests))])
        engine.step()
    drain(engine)
    assert {r.finish_reason for r in requests} <= {"length", "cancelled"}
    for request in requests:
        text = lab.plain(name, request.prompt, request.budget)
        assert tuple(request.token_ids) == text[: len(request.token_ids)]
        assert (request.finish_reason == "length") == (len(request.token_ids) == request.budget)


@pytest.mark.parametrize("name", PAIRS)
def test_used_slots_and_pages(lab: Any, load: Load, name: str) -> None:
    """What an earlier request left in a slot, here NaN, never reaches the next one."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=2)
    for _ in range(2):
        results = engine.generate(case.prompts, long())
        assert tuple(result.token_ids for result in results) == case.greedy
        engine.rounds.state.storage.fill_(0xFF)


# -- cancelling ------------------------------------------------------------------------------------


def test_cancel_at_every_point(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=2, prefill_chunk=16, draft_tokens=3)
    stay, prefilling, waiting = (engine.submit(case.prompts[i], long()) for i in (0, 2, 1))
    engine.step()
    while not prefilling.frontier:
        engine.step()
    assert 0 < prefilling.frontier < len(prefilling.prompt) and not waiting.is_admitted
    engine.cancel(waiting)
    engine.cancel(prefilling)
    assert waiting.finish_reason == prefilling.finish_reason == "cancelled"
    assert not waiting.token_ids and not prefilling.token_ids
    assert engine.scheduler.slots.free == 1
    joined = engine.submit(case.prompts[1], long())
    while len(joined.token_ids) < 5:
        engine.step()
    published = list(joined.token_ids)
    engine.cancel(joined)
    events = drain(engine)
    ends = {e.request_id: e.finish_reason for e in events if e.finish_reason}
    assert ends[joined.id] == "cancelled" and ends[stay.id] == "length"
    assert joined.token_ids == published == list(case.greedy[1][: len(published)])
    assert tuple(stay.token_ids) == case.greedy[0]
    for request in (stay, joined, waiting):
        reason = request.finish_reason
        engine.cancel(request)
        assert request.finish_reason == reason
    assert engine.step() == []
    assert engine.result(waiting) == dg.Generation((), "cancelled", ())


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("caller", [0, 1, 2])
@pytest.mark.parametrize("first_token", [True, False])
def test_cancel_inside_a_preview(
    lab: Any, load: Load, caller: int, victim: int, first_token: bool
) -> None:
    """Of another request of the round, before or behind it in the batch, or of the caller's own."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=3, draft_tokens=7)
    requests: list[dg.Request] = []
    cancelled_at: list[int] = []

    def preview(tokens: Sequence[int]) -> int:
        ready = all(r.token_ids for r in requests) or first_token
        if not cancelled_at and len(requests) == 3 and ready:
            cancelled_at.append(len(requests[victim].token_ids))
            engine.cancel(requests[victim])
        return len(tokens)

    for index in range(3):
        chosen = preview if index == caller else None
        requests.append(engine.submit(case.prompts[index], long(), preview=chosen))
    events = drain(engine)
    for index, request in enumerate(requests):
        if index == victim:
            assert request.finish_reason == "cancelled" and request.error is None
            assert len(request.token_ids) == cancelled_at[0]
        else:
            assert request.finish_reason == "length"
        assert tuple(request.token_ids) == case.greedy[index][: len(request.token_ids)]
        mine = [e for e in events if e.request_id == request.id]
        assert [t for e in mine for t in e.token_ids] == request.token_ids
        assert [e.finish_reason for e in mine if e.finish_reason] == [request.finish_reason]
        assert sum(r.committed for r in request.rounds) == max(len(request.token_ids) - 1, 0)


def test_cancelled_request_is_not_asked_again(lab: Any, load: Load) -> None:
    """A request that another's preview cancelled has no further preview of its own."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=2)
    asked: list[bool] = []

    def cancels(tokens: Sequence[int]) -> int:
        if all(r.token_ids for r in requests):
            engine.cancel(requests[1])
        return len(tokens)

    def looks(tokens: Sequence[int]) -> int:
        asked.append(requests[1].is_finished)
        return len(tokens)

    requests = [engine.submit(case.prompts[0], long(), preview=cancels)]
    requests.append(engine.submit(case.prompts[1], long(), preview=looks))
    drain(engine)
    assert asked and not any(asked)


def test_close_inside_a_preview(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=2)
    published: list[list[int]] = []

    def closes(tokens: Sequence[int]) -> int:
        if len(requests) == 3 and requests[1].token_ids and not published:
            published.extend(list(r.token_ids) for r in requests)
            engine.close()
        return len(tokens)

    requests = [engine.submit(case.prompts[0], long(), preview=closes)]
    requests += [engine.submit(case.prompts[i], long()) for i in (1, 2)]
    events = drain(engine)
    assert [r.finish_reason for r in requests] == ["cancelled"] * 3
    assert [r.token_ids for r in requests] == published and published[0] and published[1]
    assert [e.finish_reason for e in events][-3:] == ["cancelled"] * 3
    with pytest.raises(dg.EngineClosedError):
        engine.step()


# -- previews --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(1, 9))
@pytest.mark.parametrize("name", PAIRS)
def test_preview_keeps_fewer(lab: Any, load: Load, name: str, kept: int) -> None:
    """N = 1..W of every round: the text goes on as if nothing had been left out."""
    case = lab.case(name)
    engine = load(name, draft_tokens=7, max_batch=3)
    requests = [
        engine.submit(prompt, long(), preview=lambda tokens: min(kept, len(tokens)))
        for prompt in case.prompts
    ]
    drain(engine)
    assert tuple(tuple(r.token_ids) for r in requests) == case.greedy
    assert max(one.committed for r in requests for one in r.rounds) == kept


@pytest.mark.parametrize("name", PAIRS)
def test_preview_of_random_lengths(lab: Any, load: Load, rng: torch.Generator, name: str) -> None:
    case = lab.case(name)
    engine = load(name, draft_tokens=15, max_batch=3)

    def preview(tokens: Sequence[int]) -> int:
        return 1 + int(torch.randint(len(tokens), (), generator=rng))

    requests = [engine.submit(prompt, long(), preview=preview) for prompt in case.prompts]
    drain(engine)
    assert tuple(tuple(r.token_ids) for r in requests) == case.greedy


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_preview_of_nothing_ends_the_request(lab: Any, load: Load, calls: int) -> None:
    """N = 0 keeps what was published; the others go on."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=2)
    seen: list[int] = []

    def preview(tokens: Sequence[int]) -> int:
        seen.append(len(tokens))
        return 0 if len(seen) == calls else len(tokens)

    request = engine.submit(case.prompts[0], long(), preview=preview)
    other = engine.submit(case.prompts[1], long())
    drain(engine)
    assert len(seen) == calls and request.finish_reason == "stop" and request.error is None
    assert tuple(request.token_ids) == case.greedy[0][: sum(seen[:-1])]
    assert tuple(other.token_ids) == case.greedy[1]


def test_preview_sees_what_may_be_kept(lab: Any, load: Load) -> None:
    """Stop tokens and the budget have cut the tokens before the frontend chooses."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=15)
    seen: list[Ids] = []

    def preview(tokens: Sequence[int]) -> int:
        assert type(tokens) is tuple
        seen.append(tuple(tokens))
        return len(tokens)

    stop = case.greedy[1][20]
    end = case.greedy[1].index(stop) + 1
    for params, count in ((long(11), 11), (long(stop_token_ids=(stop,)), end)):
        seen.clear()
        engine.submit(case.prompts[1], params, preview=preview)
        drain(engine)
        assert tuple(t for tokens in seen for t in tokens) == case.greedy[1][:count]


def test_preview_that_drops_a_stop_token_goes_on(lab: Any, load: Load) -> None:
    """A stop token counts only where it is kept; it comes again in the next round."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=8)
    dropped: set[int] = set()

    def preview_of(stop: int) -> Callable[[Sequence[int]], int]:
        def preview(tokens: Sequence[int]) -> int:
            if tokens[-1] == stop and len(tokens) > 1 and stop not in dropped:
                dropped.add(stop)
                return len(tokens) - 1
            return len(tokens)

        return preview

    requests = {
        stop: engine.submit(case.prompts[1], long(stop_token_ids=(stop,)), preview=preview_of(stop))
        for stop in case.greedy[1]
    }
    drain(engine)
    assert dropped
    for stop, request in requests.items():
        end = case.greedy[1].index(stop) + 1
        assert request.finish_reason == "stop"
        assert tuple(request.token_ids) == case.greedy[1][:end]


class Boom(Exception):
    pass


def raising(tokens: Sequence[int]) -> int:
    raise Boom("no")


BAD_PREVIEWS: dict[str, Callable[[Sequence[int]], Any]] = {
    "raises": raising,
    "none": lambda tokens: None,
    "bool": lambda tokens: True,
    "float": lambda tokens: 1.0,
    "text": lambda tokens: "1",
    "negative": lambda tokens: -1,
    "too many": lambda tokens: len(tokens) + 1,
    "no arguments": lambda: 1,  # type: ignore[dict-item, misc]
}


@pytest.mark.parametrize("kind", BAD_PREVIEWS)
@pytest.mark.parametrize("calls", [1, 3])
def test_bad_preview(lab: Any, load: Load, kind: str, calls: int) -> None:
    """Its request fails with a named error and keeps what it has; the others are as without it."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=3)
    seen: list[int] = []

    def preview(tokens: Sequence[int]) -> Any:
        seen.append(len(tokens))
        return BAD_PREVIEWS[kind](tokens) if len(seen) == calls else len(tokens)

    requests = [
        engine.submit(prompt, long(), preview=preview if index == 1 else None)
        for index, prompt in enumerate(case.prompts)
    ]
    events = drain(engine)
    bad = requests[1]
    assert bad.finish_reason == "error" and isinstance(bad.error, dg.RequestError)
    assert f"request {bad.id}" in str(bad.error) and "preview" in str(bad.error)
    assert tuple(bad.token_ids) == case.greedy[1][: sum(seen[:-1])]
    assert [e.finish_reason for e in events if e.request_id == bad.id][-1] == "error"
    assert engine.result(bad).error is bad.error
    for index in (0, 2):
        assert tuple(requests[index].token_ids) == case.greedy[index]


@pytest.mark.parametrize("calls", [1, 3])
def test_stepping_inside_a_preview_is_refused(lab: Any, load: Load, calls: int) -> None:
    """A round that is not committed cannot have another inside it; submitting there is fine."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=3)
    submitted: list[dg.Request] = []
    seen: list[int] = []

    def preview(tokens: Sequence[int]) -> int:
        seen.append(len(tokens))
        if len(seen) == calls:
            submitted.append(engine.submit(case.prompts[0], long()))
            engine.step()
        return len(tokens)

    bad = engine.submit(case.prompts[1], long(), preview=preview)
    other = engine.submit(case.prompts[2], long())
    drain(engine)
    assert bad.finish_reason == "error" and "step" in str(bad.error)
    assert tuple(bad.token_ids) == case.greedy[1][: sum(seen[:-1])]
    assert tuple(other.token_ids) == case.greedy[2]
    assert tuple(submitted[0].token_ids) == case.greedy[0]


# -- events and streams ----------------------------------------------------------------------------


def test_events(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=3, max_batch=2)
    assert engine.is_idle and engine.step() == []
    requests = [engine.submit(prompt, long(20)) for prompt in case.prompts]
    assert not engine.is_idle
    events: list[dg.Event] = []
    while not engine.is_idle:
        step = engine.step()
        assert all(e.token_ids for e in step)
        counts = {
            r.id: sum(len(e.token_ids) for e in events + step if e.request_id == r.id)
            for r in requests
        }
        assert counts == {r.id: len(r.token_ids) for r in requests}
        events += step
    for request, ids in zip(requests, case.greedy, strict=True):
        mine = [e for e in events if e.request_id == request.id]
        assert tuple(t for e in mine for t in e.token_ids) == ids[:20]
        assert [e.finish_reason for e in mine] == [None] * (len(mine) - 1) + ["length"]


def test_streams_in_turn(lab: Any, load: Load) -> None:
    """Streams and steps drive one engine; each stream has every token of its request once."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=3, max_batch=2)
    requests = [engine.submit(prompt, long()) for prompt in case.prompts]
    streams = [engine.stream(request) for request in requests]
    tokens: list[list[int]] = [[], [], []]
    reasons: list[Any] = [None, None, None]
    while None in reasons:
        for index, stream in enumerate(streams):
            for event in stream:
                assert event.request_id == requests[index].id
                tokens[index] += event.token_ids
                reasons[index] = event.finish_reason
                break
        engine.step()
    assert reasons == ["length"] * 3
    assert tuple(tuple(ids) for ids in tokens) == case.greedy
    (event,) = engine.stream(requests[0])
    assert event == dg.Event(requests[0].id, case.greedy[0], "length")


def test_stream_closed_early(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=3, max_batch=2)
    left, other = (engine.submit(case.prompts[i], long()) for i in (0, 1))
    stream = engine.stream(left)
    first = next(stream)
    stream.close()
    assert left.finish_reason == "cancelled"
    assert tuple(left.token_ids) == case.greedy[0][: len(first.token_ids)]
    ends = [e for e in drain(engine) if e.finish_reason]
    assert [(e.request_id, e.finish_reason) for e in ends] == [
        (left.id, "cancelled"),
        (other.id, "length"),
    ]
    assert tuple(other.token_ids) == case.greedy[1]


@pytest.mark.parametrize("way", ["close", "with", "drop"])
def test_stream_closed_before_its_first_event(lab: Any, load: Load, way: str) -> None:
    """A caller that goes at once leaves no request behind."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", max_batch=2)
    stay, left = (engine.submit(prompt, long()) for prompt in case.prompts[:2])
    stream = engine.stream(left)
    if way == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "with":
        with stream:
            pass
    else:
        del stream
    assert left.finish_reason == "cancelled"
    assert [t for event in engine.stream(stay) for t in event.token_ids] == list(case.greedy[0])
    assert engine.is_idle


def test_stream_ends_with_its_request(lab: Any, load: Load) -> None:
    """Cancelled or failed meanwhile: one last event without tokens."""
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=3)
    request = engine.submit(case.prompts[0], long())
    stream = engine.stream(request)
    first = next(stream)
    engine.cancel(request)
    assert first.finish_reason is None
    assert list(stream) == [dg.Event(request.id, (), "cancelled")]
    failing = engine.submit(case.prompts[0], long(), preview=raising)
    assert list(engine.stream(failing)) == [dg.Event(failing.id, (), "error")]


def test_two_threads(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=7, max_batch=3)
    texts: dict[int, Ids] = {}

    def work(index: int) -> None:
        (result,) = engine.generate([case.prompts[index]], long())
        texts[index] = result.token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuple(texts[index] for index in range(3)) == case.greedy


# -- closing ---------------------------------------------------------------------------------------


def test_close(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    engine = load("dflash2_g16", draft_tokens=3, max_batch=1)
    running, waiting = (engine.submit(case.prompts[i], long()) for i in (0, 1))
    stream = engine.stream(running)
    first = next(stream)
    engine.close()
    engine.close()
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert list(stream) == [dg.Event(running.id, (), "cancelled")]
    assert engine.result(running).token_ids == first.token_ids
    for call in (
        engine.step,
        lambda: engine.submit(case.prompts[0]),
        lambda: engine.generate([case.prompts[0]]),
    ):
        with pytest.raises(dg.EngineClosedError):
            call()
    engine.cancel(running)


def test_context_manager(lab: Any, load: Load) -> None:
    case = lab.case("dflash2_g16")
    with pytest.raises(Boom), load("dflash2_g16") as engine:
        request = engine.submit(case.prompts[0], long())
        engine.step()
        raise Boom
    assert request.finish_reason == "cancelled"
    with pytest.raises(dg.EngineClosedError):
        engine.step()
