"""Statistics of requests and of the engine are the sums of their round records."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph.statistics import Statistics

Load = Callable[..., dg.Engine]


def counted(records: Sequence[dg.RoundRecord]) -> dict[str, Any]:
    """The same numbers, one definition at a time."""
    deepest = max((r.proposed for r in records), default=0)
    return {
        "rounds": len(records),
        "drafted": sum(r.proposed for r in records),
        "committed": sum(r.committed for r in records),
        "accepted": sum(r.accepted for r in records),
        "verified_by_position": [sum(r.proposed > i for r in records) for i in range(deepest)],
        "accepted_by_position": [sum(r.accepted > i for r in records) for i in range(deepest)],
        "tokens_per_round": sum(r.committed for r in records) / max(len(records), 1),
    }


def check(statistics: Statistics, records: Sequence[dg.RoundRecord]) -> None:
    for name, value in counted(records).items():
        assert getattr(statistics, name) == value, name
    assert sum(statistics.verified_by_position) == statistics.drafted
    pairs = zip(statistics.accepted_by_position, statistics.verified_by_position, strict=True)
    assert all(accepted <= verified for accepted, verified in pairs)
    assert statistics.accepted_by_position == sorted(statistics.accepted_by_position, reverse=True)


@pytest.mark.parametrize(
    ("draft", "draft_tokens"), [(None, 0), ("dflash", 3), ("dflash2", 1), ("dflash2", 6)]
)
def test_random_runs(
    new_engine: Load, rng: torch.Generator, draft: str | None, draft_tokens: int
) -> None:
    """Requests of every kind and end: length, stop, previews, cancellation, errors."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=rng))

    def raising(tokens: Sequence[int]) -> int:
        if below(8) == 0:
            raise ValueError("no")
        return below(len(tokens) + 1) if below(4) == 0 else len(tokens)

    engine = new_engine(draft, max_batch=3, **({"draft_tokens": draft_tokens} if draft else {}))
    requests: list[dg.Request] = []
    events: list[dg.Event] = []
    for _ in range(30):
        if below(2):
            params = dg.SamplingParams(
                max_new_tokens=1 + below(20),
                temperature=[0.0, 1.0][below(2)],
                seed=below(1000),
                stop_token_ids=(below(6),) if below(3) == 0 else (),
            )
            preview = raising if below(3) == 0 else None
            requests.append(engine.submit((1 + below(5), below(6)), params, preview=preview))
        if requests and below(8) == 0:
            engine.cancel(requests[below(len(requests))])
        events += engine.step()
    while not engine.is_idle:
        events += engine.step()

    statistics = engine.statistics
    check(statistics, [one for request in requests for one in request.rounds])
    assert statistics.ended == Counter(request.finish_reason for request in requests)
    assert Counter(e.finish_reason for e in events if e.finish_reason) == statistics.ended
    first = 0
    for request in requests:
        result = engine.result(request)
        check(result.statistics, request.rounds)
        assert result.tokens_per_round == result.statistics.tokens_per_round
        assert not result.statistics.ended
        first += bool(result.token_ids)
        for one in result.rounds:
            assert 0 <= one.accepted <= one.proposed <= draft_tokens
            assert 0 <= one.committed <= one.licensed == one.accepted + 1
    published = sum(len(r.token_ids) for r in requests)
    assert statistics.committed == published - first, "prefill gives the first token of each"


def test_by_hand() -> None:
    records = [
        dg.RoundRecord(proposed=3, accepted=2, licensed=3, committed=3),
        dg.RoundRecord(proposed=1, accepted=0, licensed=1, committed=1),
        dg.RoundRecord(proposed=0, accepted=0, licensed=1, committed=0),
        dg.RoundRecord(proposed=4, accepted=4, licensed=5, committed=2),
    ]
    statistics = Statistics.of(records)
    check(statistics, records)
    assert statistics.verified_by_position == [3, 2, 2, 1]
    assert statistics.accepted_by_position == [2, 2, 1, 1]
    assert (statistics.accepted, statistics.tokens_per_round) == (6, 1.5)
    assert (Statistics().accepted, Statistics().tokens_per_round) == (0, 0.0)


def test_before_the_first_round(new_engine: Load) -> None:
    engine = new_engine("dflash2", draft_tokens=3)
    assert engine.statistics == Statistics()
    (result,) = engine.generate([(1, 2)], dg.SamplingParams(max_new_tokens=1))
    assert result.statistics == Statistics() and result.tokens_per_round == 0.0
    assert engine.statistics == Statistics(ended={"length": 1})


def test_failed_rows(new_engine: Load) -> None:
    """A round that fails a row committed nothing of it."""
    engine = new_engine("dflash2", draft_tokens=3)
    request = engine.submit((1, 2), dg.SamplingParams(max_new_tokens=20, temperature=1.0))
    while len(request.rounds) < 2:
        engine.step()
    before = engine.statistics.committed
    for name, pool in engine.rounds.state.tensors.items():
        if name.endswith("gdn_state"):
            pool.fill_(float("nan"))
    engine.step()
    assert request.finish_reason == "error" and engine.statistics.ended == {"error": 1}
    assert engine.statistics.committed == before
    check(engine.statistics, request.rounds)


def test_another_thread_reads_while_rounds_are_counted() -> None:
    """Reading is not disturbed by numbers that were not there before."""
    counts = Statistics.of([dg.RoundRecord(2, 0, 1, 1)])
    done = threading.Event()
    problems: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            try:
                assert counts.accepted >= 0 and len(counts.verified_by_position) == 2
            except Exception as error:
                problems.append(error)
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(5_000):
            counts.add(dg.RoundRecord(2, number, number + 1, 1))
            if problems:
                break
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert not problems, problems
