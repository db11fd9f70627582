"""Tuning on a device that is a formula: search, decisions, the journal, budgets and interrupts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_graph.autotune import (
    Candidate,
    Decision,
    Journal,
    Limits,
    Outcome,
    Task,
    Tuner,
    decide,
    find_tasks,
    space_of,
    tuned_ops,
)
from dflash_graph.autotune import session as sessions
from dflash_graph.autotune.tuner import FINAL_TURNS
from dflash_graph.choices import Variation, shipped_choices
from dflash_graph.errors import OptionError, ProfileError, TuningError
from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.kernels import default_choice, device_choice, kernel_cases, kernel_ops
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile_store import Identity, lookup, read_profile, user_file
from dflash_graph.profiles import load_preset
from dflash_graph.rendering import template_info, template_names

from .fake_device import LIMITS, FakeDevice, microseconds


def pair_of(preset: str, dtype: str) -> ModelPair:
    found = load_preset(preset)
    return ModelPair(
        target_geometry_from_config(found["target"], "target"),
        draft_geometry_from_config(found["draft"], "draft"),
        dtype=dtype,
    )


@pytest.fixture(scope="module")
def tasks() -> tuple[Task, ...]:
    return find_tasks(pair_of("demo-dflash2", "bfloat16"), draft_tokens=7, max_batch=8)


@pytest.fixture
def task(tasks: Sequence[Task]) -> Task:
    return next(task for task in tasks if task.parts[0].op == "linear_norm")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def tuned(
    task: Task, device: FakeDevice, path: Path, identity: Identity, **more: Any
) -> tuple[Decision, Tuner]:
    tuner = Tuner(device, Journal(path), identity, **more)
    return tuner.tune(task, task.incumbent(None)), tuner


# ---------------------------------------------------------------- tasks and spaces


def test_tasks_are_every_family_that_rounds_launch(tasks: Sequence[Task]) -> None:
    """Against the kernels that a start-up compiles."""
    pair = pair_of("demo-dflash2", "bfloat16")
    cases = kernel_cases(pair, draft_tokens=7, max_batch=8)
    assert {part.op for t in tasks for part in t.parts} == {
        case.op for case in cases if case.op in tuned_ops()
    }
    for op in ("linear", "linear_residual_norm"):
        holes = [dict(case.holes) for case in cases if case.op == op]
        keys = [part.key for t in tasks for part in t.parts if part.op == op]
        assert {(h["O"], h["I"]) for h in holes} == {(k["O"], k["I"]) for k in keys}
    names = [(part.op, str(part.key)) for t in tasks for part in t.parts]
    assert len(set(names)) == len(names)
    assert [t.weight for t in tasks] == sorted((t.weight for t in tasks), reverse=True)
    for found in tasks:
        assert found.buckets == (16, 32, 64)  # 8 to 64 rows
        for call in found.calls:
            assert call.rows >= call.sizes.B * call.sizes.W
            assert call.launches >= 1


def test_ops_whose_bits_must_agree_share_a_task(tasks: Sequence[Task]) -> None:
    groups = {frozenset(part.op for part in t.parts) for t in tasks if len(t.parts) > 1}
    assert groups == {
        frozenset(("head_scores", "head_argmax", "head_topk")),
    }


def test_a_task_counts_the_launches_of_a_round() -> None:
    pair = pair_of("qwen3.5-27b-dflash2", "bfloat16")
    for op, launches in (("scaled_swiglu_linear", 64), ("swiglu_linear", 5)):  # target, draft
        (found,) = find_tasks(pair, draft_tokens=7, max_batch=1, ops=[op])
        (call,) = found.calls
        assert (call.launches, found.buckets) == (launches, (16,))
        assert found.weight >= launches * 2 * 34816 * 5120


def test_only_ops_with_a_space_are_tuned() -> None:
    assert set(tuned_ops()) <= set(kernel_ops())
    with pytest.raises(OptionError, match=r"op: expected one of .*linear_norm.*, got 'embedding'"):
        find_tasks(
            pair_of("demo-dflash", "float32"), draft_tokens=1, max_batch=1, ops=["embedding"]
        )


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("qwen3.5-27b-dflash2", "bfloat16"), ("demo-dflash", "bfloat16"), ("demo-dflash", "float32")],
)
def test_every_candidate_is_one_that_its_template_takes(preset: str, dtype: str) -> None:
    infos = {name: template_info(name) for name in template_names()}
    for found in find_tasks(pair_of(preset, dtype), draft_tokens=7, max_batch=2):
        held = found.incumbent(None)
        limits = Limits(shared=227 * 1024, processors=132, has_pdl=True)
        explored = found.space.explore(found.sizes, dtype, limits, held)
        assert explored[0] == held and len(set(explored)) == len(explored) > 2
        refined = found.space.refine(found.sizes, dtype, limits, explored[-1:])
        assert {c.pdl for c in refined} == {False, True}
        for call in found.calls:
            for candidate in (*explored, *refined):
                case = call.case(candidate)
                holes = infos[case.template].holes
                assert holes.keys() == dict(case.holes).keys()
                for name, value in case.holes:
                    assert holes[name].accepts(value), f"{case}: {name}"


def test_attention_keeps_its_rows() -> None:
    for found in find_tasks(pair_of("demo-dflash", "bfloat16"), draft_tokens=7, max_batch=8):
        if "attention" in found.parts[0].op:
            held = found.incumbent(None)
            explored = found.space.explore(found.sizes, "bfloat16", LIMITS, held)
            assert {dict(c.tiles)["ROWS"] for c in explored} == {64}


def test_candidates_fit_shared_memory(task: Task) -> None:
    held = task.incumbent(None)
    for shared in (40 * 1024, 99 * 1024, 227 * 1024):
        limits = Limits(shared=shared, processors=16, has_pdl=False)
        explored = task.space.explore(task.sizes, task.dtype, limits, held)
        refined = task.space.refine(task.sizes, task.dtype, limits, explored[1:])
        for candidate in (*explored[1:], *refined):
            tiles = dict(candidate.tiles)
            for rows, stages in candidate.num_stages:
                used = 2 * stages * (tiles["BLOCK_O"] + rows) * tiles["BLOCK_I"]
                assert used <= shared, candidate
        assert not any(candidate.pdl for candidate in refined)


def test_the_incumbent_is_the_devices_choice() -> None:
    (shipped,) = (c for c in shipped_choices() if c.device == "NVIDIA H200")
    pair = pair_of("qwen3.5-27b-dflash2", "bfloat16")
    (found,) = find_tasks(pair, draft_tokens=7, max_batch=8, ops=["swiglu_linear"])
    (entry,) = (e for e in shipped.entries if e.op == "swiglu_linear")
    held = found.incumbent(shipped)
    default = default_choice("swiglu_linear", found.sizes, "bfloat16")
    assert dict(held.tiles) == {**default.tiles, **entry.tiles}
    assert held.num_warps == entry.num_warps
    assert held.variations == entry.variations != {}
    for call in found.calls:
        expected = device_choice(call.op, call.sizes, call.dtype, call.rows, shipped)
        assert held.choice(call.rows) == expected
    refined = found.space.refine(found.sizes, "bfloat16", LIMITS, [held])
    assert refined and all(c.variations == held.variations for c in refined)
    (kept,) = found.entries(held, templates={"swiglu_linear": None}, versions={}, evidence={})
    assert kept.variations == entry.variations
    assert dict(held.num_stages) == {rows: entry.num_stages[rows] for rows in (16, 32, 64)}
    assert held.pdl is True and found.incumbent(None).pdl is False


def test_a_candidate_says_what_row_tiles_have_of_their_own() -> None:
    own = {
        16: Variation({}, None),
        32: Variation({"TRIGGER": 2}, None),
        64: Variation({}, 8),
    }
    found = Candidate.make({"BLOCK_O": 64}, 4, {16: 3, 64: 2}, True, own)
    assert str(found) == "BLOCK_O=64 warps=4 stages=3/2 pdl rows 32: TRIGGER=2 rows 64: warps=8"


# ---------------------------------------------------------------- search


def test_the_fastest_is_found_with_stages_for_each_row_tile(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    decision, tuner = tuned(task, FakeDevice(), tmp_path / "j", identity)
    assert decision.result == "won" and decision.winner is not None
    winner = decision.winner
    tiles = dict(winner.tiles)
    assert (tiles["BLOCK_O"], tiles["BLOCK_I"], tiles["SPLIT"]) == (64, 64, 1)
    assert (winner.num_warps, winner.pdl, tiles["TRIGGER"]) == (8, True, 1)
    assert dict(winner.num_stages) == {16: 4, 32: 2, 64: 2}
    assert decision.chosen == winner
    launches = {call.rows: call.launches for call in task.calls}
    expected = sum(n * microseconds(winner, rows) for rows, n in launches.items())
    assert decision.microseconds[0] == pytest.approx(expected, abs=0.01)
    assert decision.margin == pytest.approx(1 - expected / decision.microseconds[2], abs=1e-6)
    assert decision.noise == pytest.approx(0.0, abs=1e-6)
    assert decision.turns == FINAL_TURNS
    assert decision.tried == tuner.measured - 3  # and three finalists
    assert decision.runner_up is not None and decision.lead > 0


def few_warps_for_many_rows(candidate: Candidate, rows: int) -> float:
    """As `microseconds`, but 64 rows want four warps."""
    if rows < 64:
        return microseconds(candidate, rows)
    return microseconds(dataclasses.replace(candidate, num_warps=12 - candidate.num_warps), rows)


def uniform(candidate: Candidate, rows: int) -> float:
    """`few_warps_for_many_rows` of what a row tile really runs with."""
    choice = candidate.choice(rows)
    stages = dict.fromkeys(dict(candidate.num_stages), choice.num_stages)
    made = Candidate.make(choice.tiles, choice.num_warps, stages, choice.pdl)
    return few_warps_for_many_rows(made, rows) + 0.1 * abs(choice.tiles["BLOCK_I"] - 64)


def test_a_row_tile_gets_what_is_best_for_it_where_bits_stay(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    decision, _ = tuned(task, FakeDevice(time=uniform), tmp_path / "j", identity)
    winner = decision.winner
    assert decision.result == "won" and winner is not None
    assert winner.num_warps == 8 and winner.variations == {64: Variation({}, 4)}
    launches = {call.rows: call.launches for call in task.calls}
    assert decision.microseconds[0] == pytest.approx(
        sum(n * uniform(winner, rows) for rows, n in launches.items()), abs=0.01
    )
    evidence: dict[str, Any] = {"templates": {"linear_norm": None}, "versions": {}, "evidence": {}}
    (entry,) = task.entries(winner, **evidence)
    assert entry.variations == winner.variations


def test_other_bits_in_a_row_tile_lose(task: Task, tmp_path: Path, identity: Identity) -> None:
    """What is put together from measurements is checked again before it may win."""

    def spoil(candidate: Candidate) -> Outcome | None:
        return Outcome("wrong", "other bits with 1 of 8 requests") if candidate.own else None

    device = FakeDevice(time=uniform, spoil=spoil)
    decision, _ = tuned(task, device, tmp_path / "j", identity)
    assert decision.result == "won" and decision.winner is not None
    assert not decision.winner.variations and decision.failed >= 1


def test_narrow_tiles_do_not_vary(task: Task, tmp_path: Path, identity: Identity) -> None:
    """Below 64 features the instruction is another, and so may its order of sums be."""

    def narrow(candidate: Candidate, rows: int) -> float:
        return uniform(candidate, rows) + 1000.0 * (dict(candidate.tiles)["BLOCK_O"] >= 64)

    decision, _ = tuned(task, FakeDevice(time=narrow), tmp_path / "j", identity)
    assert decision.winner is not None and not decision.winner.variations
    assert dict(decision.winner.tiles)["BLOCK_O"] < 64


def test_what_is_measured_has_been_compiled(task: Task, tmp_path: Path, identity: Identity) -> None:
    device = FakeDevice()
    tuned(task, device, tmp_path / "j", identity)
    assert {candidate for _, candidate in device.asked} <= set(device.compiled)


def test_a_gain_below_the_noise_is_not_resolved(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    held = task.incumbent(None)

    def time(candidate: Candidate, rows: int) -> float:
        return 100.0 if candidate == held else 96.0

    decision, _ = tuned(task, FakeDevice(0.1, time=time), tmp_path / "j", identity)
    assert decision.winner != held
    assert decision.result == "not resolved" and decision.margin <= decision.noise
    assert decision.chosen == held


def test_an_incumbent_that_is_the_fastest_is_kept(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    held = task.incumbent(None)

    def time(candidate: Candidate, rows: int) -> float:
        return 90.0 if candidate == held else 100.0

    decision, _ = tuned(task, FakeDevice(time=time), tmp_path / "j", identity)
    assert (decision.result, decision.winner, decision.chosen) == ("kept", held, held)
    assert decision.margin == pytest.approx(0.1)


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_what_is_wrong_or_fails_is_noted_and_never_wins(
    status: Any, task: Task, tmp_path: Path, identity: Identity
) -> None:
    def spoil(candidate: Candidate) -> Outcome | None:
        bad = dict(candidate.tiles)["BLOCK_O"] == 64
        return Outcome(status, "y: worst error 1.0e+00") if bad else None

    decision, tuner = tuned(task, FakeDevice(spoil=spoil), tmp_path / "j", identity)
    assert decision.winner is not None and dict(decision.winner.tiles)["BLOCK_O"] != 64
    assert decision.failed > 0
    noted = [line for line in tuner.journal.lines if line["status"] == status]
    assert noted and all(line["message"] == "y: worst error 1.0e+00" for line in noted)


def test_an_incumbent_that_does_not_run_is_replaced(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    held = task.incumbent(None)
    device = FakeDevice(spoil=lambda c: Outcome("failed", "no") if c == held else None)
    decision, _ = tuned(task, device, tmp_path / "j", identity)
    assert decision.result == "won" and decision.winner != held


def test_nothing_that_runs_keeps_what_there_is(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    device = FakeDevice(spoil=lambda c: Outcome("failed", "no"))
    decision, _ = tuned(task, device, tmp_path / "j", identity)
    assert (decision.result, decision.winner) == ("kept", None)
    assert decision.chosen == task.incumbent(None)


@pytest.mark.parametrize(("gain", "result"), [(0.02, "won"), (0.001, "not resolved")])
def test_a_decision_weighs_margin_against_spread(gain: float, result: str, task: Task) -> None:
    held = task.incumbent(None)
    other = dataclasses.replace(held, pdl=not held.pdl)
    wave = [1.0 + 0.01 * (-1) ** turn for turn in range(20)]
    slow = Outcome("ok", "", {c.label: [100.0] * 20 for c in task.calls})
    fast = Outcome("ok", "", {c.label: [100 * (1 - gain) * w for w in wave] for c in task.calls})
    decision = decide(task, held, [other, held], [fast, slow], tried=2, failed=0)
    assert decision.result == result
    assert decision.margin == pytest.approx(gain, abs=1e-9)
    assert decision.noise == pytest.approx(0.01 * (1 - gain), rel=0.1)


# ---------------------------------------------------------------- journal


def test_a_second_run_measures_nothing_and_decides_the_same(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    first, _ = tuned(task, FakeDevice(0.01), tmp_path / "j", identity)
    device = FakeDevice(0.01)
    second, tuner = tuned(task, device, tmp_path / "j", identity)
    assert (tuner.measured, device.asked, device.compiled) == (0, [], [])
    assert second == first


def test_one_more_candidate_is_one_more_measurement(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    tuned(task, FakeDevice(), tmp_path / "j", identity)
    tiles = task.space.tiles

    def wider(n: Any, dtype: str) -> dict[str, tuple[int, ...]]:
        axes = dict(tiles(n, dtype))
        return axes | {"BLOCK_I": (512,)}

    held = task.incumbent(None)
    space = dataclasses.replace(task.space, tiles=wider, warps=(held.num_warps,))
    before = {c for c in task.space.explore(task.sizes, task.dtype, LIMITS, held)}
    new = [c for c in space.explore(task.sizes, task.dtype, LIMITS, held) if c not in before]
    extended = dataclasses.replace(task.space)
    object.__setattr__(
        extended,
        "explore",
        lambda *given: [*task.space.explore(*given), new[0]],
    )
    device = FakeDevice()
    _, tuner = tuned(dataclasses.replace(task, space=extended), device, tmp_path / "j", identity)
    assert [candidate for _, candidate in device.asked] == [new[0]]
    assert tuner.measured == 1


@pytest.mark.parametrize("change", ["device", "capability", "torch", "driver"])
def test_what_another_identity_measured_does_not_count(
    change: str, task: Task, tmp_path: Path, identity: Identity
) -> None:
    tuned(task, FakeDevice(), tmp_path / "j", identity)
    others = {
        "device": dataclasses.replace(identity, device="Another"),
        "capability": dataclasses.replace(identity, capability=120),
        **{
            name: dataclasses.replace(identity, versions={**identity.versions, name: "0.0"})
            for name in ("torch", "driver")
        },
    }
    _, tuner = tuned(task, FakeDevice(), tmp_path / "j", others[change])
    assert tuner.measured > 0


def test_a_changed_template_does_not_count(
    task: Task, tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned(task, FakeDevice(), tmp_path / "j", identity)
    monkeypatch.setattr("dflash_graph.autotune.tuner.template_hash", lambda op: "changed")
    _, tuner = tuned(task, FakeDevice(), tmp_path / "j", identity)
    assert tuner.measured > 0


def test_an_interrupted_run_goes_on(task: Task, tmp_path: Path, identity: Identity) -> None:
    whole, full = tuned(task, FakeDevice(0.01), tmp_path / "whole", identity)
    device = FakeDevice(0.01)
    device.interrupt_after = 20
    with pytest.raises(KeyboardInterrupt):
        tuned(task, device, tmp_path / "j", identity)
    kept = len(Journal(tmp_path / "j"))
    assert 0 < kept <= 20
    decision, tuner = tuned(task, FakeDevice(0.01), tmp_path / "j", identity)
    assert tuner.measured == full.measured - kept
    assert decision.document() == whole.document()


def test_a_torn_line_is_left_out_and_the_next_begins_anew(
    task: Task, tmp_path: Path, identity: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j"
    tuned(task, FakeDevice(), path, identity)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    torn = Journal(path)
    assert len(torn) == len(lines) - 1 and "1 lines are damaged" in caplog.text
    torn.add("key", Outcome("ok", "", {"a": [1.0]}), {})
    again = Journal(path)
    assert len(again) == len(lines)
    found = again.get("key")
    assert found is not None and found.samples == {"a": [1.0]}


def test_a_journal_is_whole_lines_of_json(task: Task, tmp_path: Path, identity: Identity) -> None:
    _, tuner = tuned(task, FakeDevice(), tmp_path / "j", identity)
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert len(lines) == tuner.measured
    assert {line["kind"] for line in lines} == {"candidate", "final"}
    assert all(line["identity"]["device"] == identity.device for line in lines)


def test_a_journal_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="file/j: expected a readable journal"):
        Journal(tmp_path / "file" / "j")
    (tmp_path / "folder").mkdir()
    journal = Journal(tmp_path / "folder" / "deep" / "j")
    (tmp_path / "folder" / "deep").write_text("")
    with pytest.raises(ProfileError, match="deep/j: expected to write a journal"):
        journal.add("key", Outcome("ok"), {})


# ---------------------------------------------------------------- budget, devices


def test_a_budget_ends_a_task_and_another_run_finishes_it(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    clock = SimpleNamespace(now=0.0)

    def tick() -> float:
        clock.now += 1.0
        return float(clock.now)

    decision, tuner = tuned(task, FakeDevice(), tmp_path / "j", identity, budget=4.0, clock=tick)
    assert decision.result == "unfinished" and decision.chosen == task.incumbent(None)
    assert 0 < tuner.measured == decision.tried
    decision, _ = tuned(task, FakeDevice(), tmp_path / "j", identity)
    assert decision.result == "won"


def test_progress_counts_up(task: Task, tmp_path: Path, identity: Identity) -> None:
    said: list[tuple[str, int, int]] = []
    tuned(task, FakeDevice(), tmp_path / "j", identity, progress=lambda *p: said.append(p))
    assert said[0][1] == 0 and all(name == task.name for name, _, _ in said)
    assert all(0 <= done < total for _, done, total in said)


def test_a_lost_device_is_an_error_and_its_candidate_is_not_tried_again(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    whole = FakeDevice()
    tuned(task, whole, tmp_path / "whole", identity)
    device = FakeDevice()
    device.lose = bad = whole.asked[10][1]
    with pytest.raises(TuningError, match=r"illegal memory access.* the same command goes on"):
        tuned(task, device, tmp_path / "j", identity)
    device = FakeDevice()
    decision, _ = tuned(task, device, tmp_path / "j", identity)
    assert decision.result == "won"
    assert bad not in [candidate for _, candidate in device.asked]


@pytest.mark.parametrize("place", ["winner", "incumbent", "runner_up"])
def test_a_finalist_that_loses_the_device_is_not_tried_again(
    task: Task, tmp_path: Path, identity: Identity, place: str
) -> None:
    """It may be one that no search measured: stages put together, or what runs now."""
    whole, _ = tuned(task, FakeDevice(), tmp_path / "whole", identity)
    bad = getattr(whole, place)
    device = FakeDevice()
    device.lose = bad
    errors = 0
    for _ in range(2):
        try:
            decision, _ = tuned(task, device, tmp_path / "j", identity)
        except TuningError:
            errors += 1
    assert errors == 1 and decision.result == "won"
    assert decision.winner != bad and decision.runner_up != bad
    if place != "winner":
        assert decision.winner == whole.winner


# ---------------------------------------------------------------- session


def test_a_session_stores_winners_as_it_goes(
    tasks: Sequence[Task], tmp_path: Path, identity: Identity
) -> None:
    path = user_file(identity.device, identity.capability)
    chosen = tasks[:3]
    tuner = Tuner(FakeDevice(), Journal(tmp_path / "j"), identity)
    decisions = sessions.tune(chosen, tuner, lookup(identity), path)
    first = next(decisions)
    assert first.result == "won"
    assert {e.op for e in read_profile(path).entries} == {p.op for p in chosen[0].parts}
    rest = list(decisions)
    found = lookup(identity)
    for decision in (first, *rest):
        for call in decision.task.calls:
            choice = found.find(call.op, call.sizes, call.dtype, call.rows)
            assert choice == decision.chosen.choice(call.rows)
    for entry in found.entries:
        assert entry.template and dict(entry.versions) == dict(identity.versions)
        assert entry.evidence["margin"] > entry.evidence["noise"]


def test_a_session_keeps_what_did_not_win_out_of_the_store(
    task: Task, tmp_path: Path, identity: Identity
) -> None:
    device = FakeDevice(time=lambda candidate, rows: 100.0)
    path = tmp_path / "p.json"
    (decision,) = sessions.tune([task], Tuner(device, Journal(tmp_path / "j"), identity),
                                lookup(identity), path)  # fmt: skip
    assert decision.result in ("kept", "not resolved")
    assert not path.exists()


def test_the_same_store_gives_the_same_choices_twice(
    tasks: Sequence[Task], tmp_path: Path, identity: Identity
) -> None:
    """Two runs over other orders of tasks leave equal files, byte for byte."""
    texts = []
    for number, order in enumerate((tasks[:4], tuple(reversed(tasks[:4])))):
        path = tmp_path / f"{number}.json"
        tuner = Tuner(FakeDevice(), Journal(tmp_path / f"{number}.jsonl"), identity)
        list(sessions.tune(order, tuner, lookup(identity), path))
        texts.append(path.read_text())
    assert texts[0] == texts[1]


def test_the_space_of_an_op_is_one(tasks: Sequence[Task]) -> None:
    for found in tasks:
        assert all(space_of(part.op) is found.space for part in found.parts)
