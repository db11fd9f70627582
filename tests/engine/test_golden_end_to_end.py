"""Whole greedy runs against the reference's: ids, rounds, blocks, tails, stops, budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dflash_graph as dg

CASES = ("dflash2_g16", "dflash_host_full_attention", "dflash_mixed_w16", "dflash_mixed_w6")

Load = Callable[..., dg.Engine]


class Watch:
    """Rounds of an engine as they run: per request, frontier, verified columns and their ids."""

    def __init__(self, engine: dg.Engine) -> None:
        self.rounds: dict[int, list[tuple[int, list[int]]]] = {}
        self._engine = engine
        for executor in engine.rounds.values():
            self._wrap(executor)

    def _wrap(self, executor: Any) -> None:
        forward = executor.forward

        def watched(*args: Any, **options: Any) -> Any:
            outputs = forward(*args, **options)
            by_slot = {r.slot: r.id for r in self._engine.scheduler.active}
            names = ("slots", "frontier", "live_columns")
            columns = [executor.inputs[name].tolist() for name in names]
            ids = outputs["verify/ids"].tolist()
            for slot, frontier, live, row in zip(*columns, ids, strict=True):
                self.rounds.setdefault(by_slot[slot], []).append((frontier, row[:live]))
            return outputs

        executor.forward = watched


def check(run: dict[str, Any], case: Any, result: dg.Generation, kind: str) -> None:
    prompt = case.prompts[run["prompt"]]
    assert list(prompt + result.token_ids) == run["output_ids"]
    stopped = run.get("stop_token_ids") is not None
    assert result.finish_reason == ("stop" if stopped else "length")
    remaining = run["max_new_tokens"] - 1
    whole = 0  # rounds at the start which no budget cuts
    for record in result.rounds:
        assert record.proposed == min(run["block_size"] - 1, remaining)
        assert record.licensed == record.accepted + 1 and record.accepted <= record.proposed
        whole += remaining >= run["block_size"]
        remaining -= record.committed
    expected = run["acceptance_lengths"]
    committed = [r.committed for r in result.rounds]
    if kind == "dflash2" and "acceptance_lengths_full_width_draft" in run:
        expected = run["acceptance_lengths_full_width_draft"]
    elif kind == "dflash2":
        # At the tail the reference cuts the draft's block too; DFlash2 drafts on all columns.
        expected, committed = expected[:whole], committed[:whole]
    assert committed == expected


@pytest.mark.parametrize("block_size", [2, 4, 8, 16])
@pytest.mark.parametrize("name", CASES)
def test_runs(lab: Any, load: Load, name: str, block_size: int) -> None:
    """Every run of a block size: alone, round by round, and then all of them in company."""
    case = lab.case(name)
    engine = load(name, draft_tokens=block_size - 1, max_batch=8)
    kind = engine.rounds.model.pair.draft_name
    runs = [run for run in case.runs if run["block_size"] == block_size]
    assert len(runs) == (8 if block_size == 8 else 3)
    params = [
        dg.SamplingParams(
            max_new_tokens=run["max_new_tokens"], stop_token_ids=run.get("stop_token_ids") or ()
        )
        for run in runs
    ]
    watch = Watch(engine)
    for run, one in zip(runs, params, strict=True):
        request = engine.submit(case.prompts[run["prompt"]], one)
        while not request.is_finished:
            engine.step()
        check(run, case, engine.result(request), kind)
        if "rounds" not in run:
            continue
        count = run["rounds_before_tail"] if kind == "dflash2" else len(run["rounds"])
        assert count > 0
        seen = watch.rounds[request.id][:count]
        assert seen == [(r["frontier"], r["block"]) for r in run["rounds"][:count]]
        expected = [(r["accepted"], r["produced"]) for r in run["rounds"][:count]]
        assert [(r.accepted, r.committed) for r in request.rounds[:count]] == expected
    prompts = [case.prompts[run["prompt"]] for run in runs]
    for run, result in zip(runs, engine.generate(prompts, params), strict=True):
        check(run, case, result, kind)


@pytest.mark.parametrize("name", CASES)
def test_plain_decoding(lab: Any, load: Load, name: str) -> None:
    case = lab.case(name)
    engine = load(name, speculative=False, max_batch=3)
    results = engine.generate(case.prompts, dg.SamplingParams(max_new_tokens=48))
    assert tuple(result.token_ids for result in results) == case.greedy
    for result in results:
        assert {(r.proposed, r.licensed, r.committed) for r in result.rounds} == {(0, 1, 1)}


@pytest.mark.parametrize("draft_tokens", range(1, 16))
@pytest.mark.parametrize("name", ["dflash_mixed_w16", "dflash2_g16"])
def test_every_draft_length(lab: Any, load: Load, name: str, draft_tokens: int) -> None:
    case = lab.case(name)
    engine = load(name, draft_tokens=draft_tokens, max_batch=3)
    results = engine.generate(case.prompts, dg.SamplingParams(max_new_tokens=48))
    assert tuple(result.token_ids for result in results) == case.greedy
    accepted = [r.accepted for result in results for r in result.rounds]
    assert max(accepted) >= min(draft_tokens, 4), "the pair should draft well here"


@pytest.mark.parametrize(
    ("name", "block_size"),
    [*((name, 8) for name in CASES), *(("dflash2_g16", size) for size in (2, 4, 16))],
)
def test_inductor(lab: Any, load: Load, name: str, block_size: int) -> None:
    """Runs through compiled steps: ids and rounds as the reference has them."""
    case = lab.case(name)
    engine = load(name, lowering="inductor", draft_tokens=block_size - 1, max_batch=1)
    kind = engine.rounds.model.pair.draft_name
    runs = [run for run in case.runs if run["block_size"] == block_size and "rounds" in run]
    assert len(runs) == 3
    for run in runs:
        (result,) = engine.generate(
            [case.prompts[run["prompt"]]], dg.SamplingParams(max_new_tokens=48)
        )
        check(run, case, result, kind)
