"""Rehearsals: the host's part of a round over stand-ins; the engine's own state is not touched."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dflash_graph as dg
from dflash_graph import executors
from dflash_graph.executors import Executor, RoundExecutor, compile_segments, tail
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.profiles import load_preset
from dflash_graph.rehearsal import Rehearsals
from dflash_graph.rounds import Rounds
from dflash_graph.scheduler import Scheduler
from dflash_graph.state import Capacities

Load = Callable[..., dg.Engine]

GREEDY = dg.SamplingParams(max_new_tokens=30)
SAMPLED = dg.SamplingParams(max_new_tokens=30, temperature=1.0, seed=7)


def everything(rounds: Rounds, scheduler: Scheduler) -> list[Any]:
    """What a round of an engine reads or leaves."""
    requests = [
        (list(r.history), list(r.token_ids), list(r.rounds), r.frontier, list(r.pages), r.slot)
        for r in scheduler.active
    ]
    buffers = [rounds.arena, rounds.state.storage]
    for executor in rounds.executors().values():
        buffers += [executor.inputs.buffer, executor.outputs.buffer]
    return [requests, list(scheduler.events), *(b.clone() for b in buffers)]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "speculative"),
    [("dflash_mixed_w16", True), ("dflash2_g16", True), ("dflash2_g16", False)],
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rounds_with_rehearsals(
    lab: Any,
    load: Load,
    random_ids: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    speculative: bool,
    params: dg.SamplingParams,
) -> None:
    """Called in the middle of every round, they leave tokens, state, frames and requests alone."""
    prompts = [random_ids(length, lab.case(name).vocab) for length in (5, 19, 33)]
    options = {"max_batch": 3, "speculative": speculative}
    plain = load(name, **options).generate(prompts, params)

    engine = load(name, **options)
    engine.scheduler = Scheduler(engine.rounds, Rehearsals(engine.rounds))
    played = 0

    def run(executor: Executor, index: int = 0, probe: Any = None, meanwhile: Any = None) -> None:
        nonlocal played
        Executor.run(executor, index, probe)
        if meanwhile is not None:
            before = everything(engine.rounds, engine.scheduler)
            for _ in range(3):
                meanwhile()
            assert same(before, everything(engine.rounds, engine.scheduler))
            played += 3

    monkeypatch.setattr(RoundExecutor, "run", run)
    found = engine.generate(prompts, params)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert [r.rounds for r in found] == [r.rounds for r in plain]
    assert played >= 3 * max(len(r.rounds) for r in found)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_rehearsal_goes_through_a_round_and_keeps_nothing(load: Load, is_greedy: bool) -> None:
    engine = load("dflash2_g16", max_batch=3, draft_tokens=6)
    rehearsals = Rehearsals(engine.rounds)
    play = rehearsals.of(3, is_greedy)
    assert rehearsals.of(3, is_greedy) is play
    play()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(500):
        play()
    gc.collect()
    assert len(gc.get_objects()) - before < 20
    (scheduler,) = (
        cell.cell_contents
        for cell in play.__closure__ or ()
        if isinstance(cell.cell_contents, Scheduler)
    )
    assert scheduler.statistics.rounds == 3 * 501, "of its own, three requests a time"
    assert scheduler.statistics.committed == 4 * 3 * 501, "half of a block and one more"
    assert engine.statistics.rounds == 0
    assert all(executor.runs == 0 for executor in engine.rounds.executors().values())


def test_an_engine_on_the_cpu_has_none(load: Load) -> None:
    """Nothing is waited for there."""
    assert load("dflash2_g16").scheduler._meanwhile is None


def test_the_tail_of_a_round(load: Load) -> None:
    """A round of the 27B is cut before its last read of 1 GiB: the head; a small one nowhere."""
    preset = load_preset("qwen3.5-27b-dflash2")
    pair = ModelPair(
        target_geometry_from_config(preset["target"], "target"),
        draft_geometry_from_config(preset["draft"], "draft"),
        dtype="bfloat16",
    )
    compiled = compile_segments(
        declare_round(pair, "triton", draft_tokens=7, batch=1).segments, Capacities(1, 256)
    )
    forward, finish = compiled.schedules
    (first, *_) = forward.steps[tail(forward)].nodes
    assert first.op == "head_argmax"
    assert tail(finish) == 0
    assert all(tail(s) == 0 for s in load("dflash2_g16").rounds[1].compiled.schedules)


def test_the_parts_of_a_round_are_the_round(
    load: Load, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its two graphs launch, one after the other, gives what one run gives."""
    engine = load("dflash2_g16")
    request = engine.submit(random_ids(9, 64), GREEDY)
    for _ in range(3):
        engine.step()
    executor = engine.rounds[1]
    assert len(executor._parts(0)) == len(executor._parts(1)) == 1

    def results() -> dict[str, Any]:
        return {name: executor.outputs.read(name) for name in executor.outputs.layout.fields}

    executor.run()
    expected = results()
    monkeypatch.setattr(executors, "_TAIL_BYTES", 1)
    executor.outputs.clear()
    executor.poison()
    begin, end = executor._parts(0)
    begin()
    assert results() != expected
    end()
    assert results() == expected
    assert len(executor._parts(1)) == 1, "a commit returns nothing to wait for"
    engine.cancel(request)
