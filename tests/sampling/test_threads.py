"""Several threads over one engine: every stream is whole, prompt, and ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import dflash_graph as dg

Load = Callable[..., dg.Engine]
Ids = tuple[int, ...]

#: Seconds after which a thread that should have ended hangs.
HANGS = 60.0


def params_of(index: int, count: int) -> dg.SamplingParams:
    law: dict[str, Any] = {"temperature": 1.2} if index % 3 else {"presence_penalty": 0.3}
    return dg.SamplingParams(max_new_tokens=count, seed=index, **law)


def prompt_of(index: int) -> Ids:
    return tuple((index + j) % 6 for j in range(1 + 5 * (index % 5)))


def run_all(work: Callable[[int], None], count: int) -> None:
    """Run `work(0..count-1)` in a thread each; what one raises is raised."""
    failures: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def test_streams_of_many_threads(tiny: Any, new_engine: Load) -> None:
    """Every token once and in order, as alone; requests are submitted in the threads."""
    expected = [
        tiny.engine("dflash2", draft_tokens=3).generate([prompt_of(i)], params_of(i, 30))[0]
        for i in range(9)
    ]
    engine = new_engine("dflash2", draft_tokens=3, max_batch=3)
    events: list[list[dg.Event]] = [[] for _ in range(9)]
    results: dict[int, dg.Generation] = {}

    def work(index: int) -> None:
        if index % 4 == 3:
            (results[index],) = engine.generate([prompt_of(index)], params_of(index, 30))
            return
        request = engine.submit(prompt_of(index), params_of(index, 30))
        events[index].extend(engine.stream(request))
        results[index] = engine.result(request)

    run_all(work, 9)
    for index, one in enumerate(expected):
        assert results[index] == one
        if index % 4 != 3:
            assert tuple(t for e in events[index] for t in e.token_ids) == one.token_ids
            assert [e.finish_reason for e in events[index][:-1]] == [None] * (
                len(events[index]) - 1
            )
            assert all(e.token_ids for e in events[index])
            assert events[index][-1].finish_reason == "length"


def test_a_waiting_stream_does_not_keep_tokens_from_another(new_engine: Load) -> None:
    """With one slot, the second stream waits for the whole first request; the first is prompt."""
    engine = new_engine("dflash2", draft_tokens=3, max_batch=1)
    first = engine.submit(prompt_of(1), params_of(1, 40))
    second = engine.submit(prompt_of(2), params_of(2, 10))
    texts: dict[int, list[dg.Event]] = {}
    started = threading.Event()

    def wait() -> None:
        started.set()
        texts[1] = list(engine.stream(second))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    started.wait(HANGS)
    texts[0] = list(engine.stream(first))
    thread.join(HANGS)
    assert not thread.is_alive()
    # Each round gives one event, unless the other thread ran several while this one was between.
    assert len(texts[0]) > len(first.rounds) // 4
    assert texts[0][0].finish_reason is None
    assert [t for e in texts[1] for t in e.token_ids] == second.token_ids


def test_closing_a_stream_among_busy_ones(new_engine: Load) -> None:
    """It is cancelled within a round, however busy other threads keep the engine."""
    engine = new_engine("dflash2", draft_tokens=3, max_batch=4)
    stay = [engine.submit((1, i), dg.SamplingParams(max_new_tokens=61)) for i in range(3)]
    left = engine.submit((2, 2), dg.SamplingParams(max_new_tokens=61))
    streams = [
        threading.Thread(target=lambda r=r: list(engine.stream(r)), daemon=True) for r in stay
    ]
    for thread in streams:
        thread.start()
    stream = engine.stream(left)
    while len(left.rounds) < 3:
        next(stream)
    rounds = len(left.rounds)
    stream.close()
    assert left.finish_reason == "cancelled"
    # One round that ran, and one that began before the call was seen.
    assert len(left.rounds) <= rounds + 2
    for thread in streams:
        thread.join(HANGS)
        assert not thread.is_alive()
    assert all(r.finish_reason == "length" for r in stay)


def test_cancel_is_seen_by_the_next_round(new_engine: Load) -> None:
    """A caller that waits for its turn is served by whoever steps next."""
    engine = new_engine("dflash2", draft_tokens=3, max_batch=2)
    waits = threading.Event()

    def preview(tokens: Any) -> int:
        if len(stay.rounds) == 2 and not thread.ident:
            thread.start()
            waits.wait(HANGS)
        return len(tokens)

    stay = engine.submit((1,), params_of(0, 30), preview=preview)
    left = engine.submit((2,), params_of(1, 30))

    def leave() -> None:
        waits.set()
        engine.cancel(left)

    thread = threading.Thread(target=leave, daemon=True)
    while not stay.is_finished:
        engine.step()
    thread.join(HANGS)
    assert left.finish_reason == "cancelled"
    assert len(left.rounds) <= 4


def test_closing_the_engine_under_streams(new_engine: Load) -> None:
    """Each ends with what it had, or with one named error."""
    for rounds in (0, 1, 5):
        engine = new_engine("dflash2", draft_tokens=3, max_batch=2)
        ends: list[Any] = []

        def work(index: int, engine: dg.Engine = engine, ends: list[Any] = ends) -> None:
            try:
                if index % 3 == 2:
                    ends.append(
                        engine.generate([(1, index)], params_of(index, 58))[0].finish_reason
                    )
                    return
                request = engine.submit((1, index), params_of(index, 58))
                events = list(engine.stream(request))
                assert [t for e in events for t in e.token_ids] == request.token_ids
                ends.append(events[-1].finish_reason)
            except dg.EngineClosedError as error:
                ends.append(type(error))

        def close(engine: dg.Engine = engine, rounds: int = rounds) -> None:
            # A loop that kept the interpreter's lock would let a round's ops wait 5 ms each.
            while engine.statistics.rounds < rounds:
                time.sleep(0.001)
            engine.close()

        closer = threading.Thread(target=close, daemon=True)
        closer.start()
        run_all(work, 6)
        closer.join(HANGS)
        assert not closer.is_alive()
        assert len(ends) == 6 and set(ends) <= {"cancelled", "length", dg.EngineClosedError}
        assert engine.is_idle
