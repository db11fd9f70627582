"""`profile`: what each of its commands prints, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph import demo
from dflash_graph.cli.profile import _COMMANDS
from dflash_graph.cli.profile_acceptance import parse_cost
from dflash_graph.cli.profile_read import parse_share
from dflash_graph.cli.profile_what_if import parse_size
from dflash_graph.errors import OptionError
from dflash_graph.profile.build import READ_CEILING
from dflash_graph.profile.document import Profile, json_schema
from dflash_graph.profile.lint import rules
from dflash_graph.profile.parts import Samples
from dflash_graph.report import plan_memory
from dflash_graph.state import Capacities

Run = Callable[..., Any]

NAMES = [name for name, *_ in _COMMANDS]
DEMO = ("--preset", "demo-dflash2")
SMALL = ("--max-context", "256", "--context", "100", "--prefill-chunk", "64", "--max-batch", "1")
MEASURE = ("--measure", "--turns", "3", "--dtype", "float32")


def document(done: Any) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def assert_one_error(done: Any, *words: str) -> None:
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture
def declared(cli: Run, tmp_path: Path) -> Path:
    path = tmp_path / "declared.json"
    done = cli("profile", "build", *DEMO, *SMALL, "-o", path)
    assert done.exit_code == 0, done.output
    return path


def timed(path: Path, made: Path, factor: float) -> Path:
    """A measured profile with steady rounds that take so many times as long."""
    profile = Profile.load(path)
    executors = []
    for executor in profile.executors:
        if executor.measured is not None:
            took = executor.measured.median * factor
            values = tuple(took * share for share in (0.99, 1.0, 1.01))
            executor = executor.model_copy(update={"measured": Samples(values=values)})
        executors.append(executor)
    profile.model_copy(update={"executors": tuple(executors)}).save(made)
    return made


# -- build -----------------------------------------------------------------------------------------


def test_build_from_configs(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    built = ("profile", "build", *DEMO, *SMALL, "--draft-tokens", "3", "-o", path)
    done = cli(*built)
    assert done.exit_code == 0 and f"written to {path}" in done.stdout
    profile = Profile.load(path)
    assert profile.identity.options["draft_tokens"] == 3
    assert profile.identity.name == "demo-dflash2"
    again = document(cli(*built, "--json"))
    assert again["executors"] == profile.model_dump(mode="json")["executors"]


def test_build_for_a_device_without_one(cli: Run) -> None:
    kernels = ("--backend", "triton", "--device-profile", "NVIDIA H200", "--ceiling", "4.4")
    found = document(cli("profile", "build", *DEMO, *SMALL, *kernels, "--tflops", "800", "--json"))
    assert found["identity"]["device"]["name"] == "NVIDIA H200"
    assert found["ceiling"] == {"read_tb_per_s": 4.4, "tflop_per_s": 800.0, "source": "stated"}
    plain = document(cli("profile", "build", *DEMO, *SMALL, "--backend", "triton", "--json"))
    assert plain["identity"]["choices"] == "default"
    first = plain["executors"][0]["segments"][0]["nodes"][0]
    assert first["implementation"] == "triton" and first["config"]["template"] == "slot_rows"


def test_build_of_directories(cli: Run) -> None:
    directories = ("--target", demo.target_directory(), "--draft", demo.draft_directory("dflash2"))
    found = document(cli("profile", "build", *directories, *SMALL, "--json"))
    named = found["identity"]["name"]
    assert demo.target_directory().name in named and " with " in named
    plain = document(cli("profile", "build", *directories[:2], *SMALL, "--json"))
    assert plain["identity"]["geometry"]["draft"] is None


@pytest.mark.parametrize(
    "source",
    [DEMO, ("--target", demo.target_directory(), "--draft", demo.draft_directory("dflash2"))],
    ids=["random weights", "a checkpoint"],
)
def test_build_measures_real_rounds(cli: Run, source: tuple[object, ...]) -> None:
    found = Profile.model_validate(
        document(cli("profile", "build", *source, *SMALL, *MEASURE, "--json"))
    )
    executor = found.executor("round B=1")
    assert executor.measured is not None and len(executor.measured.values) == 3
    assert all(node.measured is not None for node in executor.nodes())
    assert found.ceiling.source == "measured"
    assert {"graphs", "pools", "bind"} <= {stage.name for stage in found.startup}
    assert ("weights" in {stage.name for stage in found.startup}) == (source is not DEMO)
    assert found.identity.device.kind == "cpu"


def test_a_measured_profile_can_have_a_stated_ceiling(cli: Run) -> None:
    found = document(
        cli("profile", "build", *DEMO, *SMALL, *MEASURE, "--ceiling", "0.02", "--json")
    )
    assert found["ceiling"]["read_tb_per_s"] == 0.02 and found["ceiling"]["source"] == "stated"


def test_build_without_a_device_is_one_error(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli("profile", "build", *DEMO, *SMALL, "--measure", "--backend", "triton")
    assert_one_error(done, "device: expected 'cpu' (torch sees no CUDA device)")
    assert done.stdout == ""
    done = cli("profile", "build", *DEMO, *SMALL, "--measure", "--device", "cuda")
    assert_one_error(done, "torch sees no CUDA device")


def test_what_build_refuses(cli: Run, tmp_path: Path) -> None:
    build = ("profile", "build", *DEMO)
    assert_one_error(cli(*build, "--context", "9000"), "context: expected 0..8184", "9000")
    assert_one_error(
        cli(*build, "--context", "3", "--measure"), "context: expected 8..8184", "got 3"
    )
    assert_one_error(cli(*build, "--device-profile", "Nothing"), "'NVIDIA H200'", "'Nothing'")
    assert_one_error(cli(*build, "--resources"), "--backend triton")
    triton = (*build, "--backend", "triton", "--resources")
    assert_one_error(cli(*triton), "--device-profile")
    missing = tmp_path / "nothing" / "profile.json"
    assert_one_error(cli(*build, *SMALL, "-o", missing), str(missing))
    assert_one_error(cli("profile", "build", "--preset", "nothing"), "'nothing'")
    for wrong in (("--device", "cpu"), ("--measure", "--device-profile", "NVIDIA H200")):
        done = cli(*build, *wrong)
        assert done.exit_code == 2 and "Error: " in done.stderr


@pytest.mark.slow
def test_resources_of_kernels(cli: Run) -> None:
    pytest.importorskip("triton")
    kernels = ("--backend", "triton", "--device-profile", "NVIDIA H200", "--resources")
    small = ("--max-batch", "1", "--draft-tokens", "3")
    found = Profile.model_validate(
        document(cli("profile", "build", *DEMO, *kernels, *small, "--json"))
    )
    for node in found.executor("round B=1").nodes():
        assert node.resources, node.name
        assert all(0 < kernel.registers <= 255 for kernel in node.resources)


# -- what-if ---------------------------------------------------------------------------------------


def test_what_if(cli: Run) -> None:
    numbers = ("--draft-tokens", "3", "--draft-tokens", "7", "--max-batch", "2")
    found = document(cli("profile", "what-if", *DEMO, *numbers, "--memory", "1GiB", "--json"))
    assert [one["draft_tokens"] for one in found["scenarios"]] == [3, 7]
    from dflash_graph.cli.selection import Dtype, select_pair

    pair = select_pair("demo-dflash2", None, None, None, Dtype.bfloat16)[0]
    for one, fits in zip(found["scenarios"], found["fits"], strict=True):
        sizes = {"draft_tokens": one["draft_tokens"], "max_batch": 2, "prefill_chunk": 1024}
        expected = plan_memory(pair, "eager", **sizes, capacities=Capacities(2, 8192))
        assert one["total"] == expected.total_bytes
        most = fits["by_batch"]["2"]
        size = plan_memory(pair, "eager", **sizes, capacities=Capacities(2, most)).total_bytes
        assert size <= fits["memory_bytes"] == 1 << 30
    shown = cli("profile", "what-if", *DEMO, *numbers, "--memory", "10MB").stdout
    assert "K = 3 on 9.54 MiB" in shown and "B = 2: does not fit" in shown


def test_what_if_refuses(cli: Run) -> None:
    what_if = ("profile", "what-if", *DEMO)
    assert_one_error(cli(*what_if, "--memory", "much"), "80GB", "'much'")
    assert_one_error(cli(*what_if, "--context", "8190"), "at most 8184 tokens")
    assert cli(*what_if, "--max-batch", "9").exit_code == 2


def test_what_if_of_trees(cli: Run, rounds_file: Path) -> None:
    what_if = ("profile", "what-if", *DEMO, "--tree-width", "2", "--tree-width", "1")
    numbers = ("--draft-tokens", "3", "--draft-tokens", "7", "--max-batch", "2")
    arguments = (*what_if, *numbers, "--acceptance", rounds_file)
    found = document(cli(*arguments, "--json"))["scenarios"]
    shapes = [(one["draft_tokens"], one["tree_width"], one["columns"]) for one in found]
    assert shapes == [(3, 1, 4), (3, 2, 7), (7, 1, 8), (7, 2, 15)]
    # Of five rounds that accepted 0, 1, 2, 3 and 7 drafts.
    assert [one["chain_tokens"] for one in found] == pytest.approx([2.8, 2.8, 3.6, 3.6])
    for chain, tree in (found[:2], found[2:]):
        assert tree["chain_floor_us"] == chain["round_floor_us"] < tree["round_floor_us"]
        assert (chain["break_even"], tree["break_even"] > 1) == (1.0, True)
        assert tree["round_bytes"] > chain["round_bytes"]
        assert tree["round_flops"] > chain["round_flops"]
        assert tree["needed_tokens"] == pytest.approx(tree["break_even"] * tree["chain_tokens"])
        assert tree["most_chain_tokens"] * tree["break_even"] == tree["draft_tokens"] + 1
    without = document(cli(*what_if, "--json"))["scenarios"][0]
    assert without["chain_tokens"] is None and without["needed_tokens"] is None
    shown = cli(*arguments).stdout
    assert "break even" in shown and "tree must accept" in shown
    assert "break even" not in cli("profile", "what-if", *DEMO).stdout
    assert "K = 7, width 2 on" in cli(*what_if, "--memory", "1GB").stdout


def test_what_if_of_trees_refuses(cli: Run, rounds_file: Path, tmp_path: Path) -> None:
    tree = ("profile", "what-if", *DEMO, "--tree-width")
    assert_one_error(cli(*tree, "3"), "tree_width: expected 1..2 with K = 7", "got 3 (W = 22)")
    assert_one_error(cli(*tree, "2", "--draft-tokens", "0"), "plain decoding has no drafts")
    assert_one_error(cli(*tree, "2", "--context", "8180"), "at most 8177 tokens", "block of 15")
    dflash = ("profile", "what-if", "--preset", "demo-dflash", "--tree-width", "2")
    assert_one_error(cli(*dflash), "dflash2 draft's candidates, got dflash")
    counts = ("--acceptance", rounds_file)
    assert_one_error(cli(*tree, "1", "--draft-tokens", "8", *counts), "K = 8 drafts, got 7")
    missing = tmp_path / "nothing.json"
    assert_one_error(cli(*tree, "1", "--acceptance", missing), str(missing))
    assert cli(*tree, "0").exit_code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("141 GiB", 141 << 30), ("1.5MiB", 3 << 19), ("7", 7), ("2kb", 2000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "1e3", "1PB", "1 2", "9" * 400 + "GB", "9" * 305 + "TB", str(1 << 63)],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(OptionError, match="memory: expected a size"):
        parse_size(text)


# -- list and show ---------------------------------------------------------------------------------


def test_list(cli: Run, measured_file: Path, declared: Path, tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_bytes(measured_file.read_bytes())
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "torn.json").write_text(measured_file.read_text()[:5000])
    found = document(cli("profile", "list", tmp_path, "--json"))
    assert [one["file"] for one in found["profiles"]] == ["declared.json", "measured.json"]
    assert [one["round_us"] is None for one in found["profiles"]] == [True, False]
    assert len(found["damaged"]) == 1 and "torn.json" in found["damaged"][0]
    shown = cli("profile", "list", tmp_path).stdout
    assert "measured.json" in shown and "damaged: " in shown and "other.json" not in shown
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli("profile", "list", empty).stdout == f"no profiles in {empty}\n"
    assert_one_error(cli("profile", "list", tmp_path / "nothing"), "expected a folder")


@pytest.mark.parametrize("by", ["region", "op", "node"])
def test_show(cli: Run, measured_file: Path, by: str) -> None:
    profile = Profile.load(measured_file)
    executor = profile.executors[0]
    found = document(cli("profile", "show", measured_file, "--by", by, "--json"))
    parts = found["parts"]
    assert sum(part["nodes"] for part in parts) == sum(1 for _ in executor.nodes())
    assert sum(part["measured_us"] for part in parts) == pytest.approx(executor.attributed_us)
    whole = found["attributed_us"] + found["unattributed_us"]
    assert whole == pytest.approx(found["measured_us"])
    shown = cli("profile", "show", measured_file, "--by", by).stdout
    assert all(part[by] in shown for part in parts)
    assert "unattributed" in shown and "start-up" in shown and "weights.target" in shown


def test_show_one_executor_or_node(cli: Run, measured_file: Path) -> None:
    shown = cli("profile", "show", measured_file, "--executor", "first token").stdout
    assert "first token, 100 tokens of context" in shown
    node = "verify/layer.3/ffn/down"
    text = cli("profile", "show", measured_file, "--node", node).stdout
    assert text.startswith(node) and "weight        target/layers.3.mlp.down_proj.weight" in text
    found = document(cli("profile", "show", measured_file, "--node", node, "--json"))
    assert found["name"] == node and 0 < found["of_round"] < 1
    assert_one_error(cli("profile", "show", measured_file, "--node", "x/down"), "layer.0/ffn/down")
    assert_one_error(cli("profile", "show", measured_file, "--executor", "x"), "'round B=1'")


def test_show_what_was_never_measured(cli: Run, declared: Path) -> None:
    shown = cli("profile", "show", declared)
    assert shown.exit_code == 0 and "measured us" not in shown.stdout
    assert document(cli("profile", "show", declared, "--json"))["measured_us"] is None


# -- diff and lint ---------------------------------------------------------------------------------


def test_diff_fails_above_a_share(cli: Run, measured_file: Path, tmp_path: Path) -> None:
    before = timed(measured_file, tmp_path / "before.json", 1.0)
    after = timed(measured_file, tmp_path / "after.json", 3.0)
    done = cli("profile", "diff", before, after)
    assert done.exit_code == 0 and "+200.0%" in done.stdout
    failed = cli("profile", "diff", before, after, "--fail-above", "3%")
    assert_one_error(failed, "round B=1: expected at most 3%", "+200.0%")
    assert failed.stdout == done.stdout
    assert cli("profile", "diff", before, after, "--fail-above", "250%").exit_code == 0
    assert cli("profile", "diff", after, before, "--fail-above", "0").exit_code == 0
    found = cli("profile", "diff", before, after, "--fail-above", "0.03", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["slower"] == ["round B=1"]


def test_diff_names_what_changed(cli: Run, declared: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    cli("profile", "build", *DEMO, *SMALL, "--backend", "triton", "-o", other)
    shown = cli("profile", "diff", declared, other, "--nodes", "2").stdout
    assert "option lowering" in shown and "nodes removed" in shown and "more\n" in shown
    found = document(cli("profile", "diff", declared, other, "--json"))
    assert found["added"] and found["removed"] and found["changed"]
    assert_one_error(cli("profile", "diff", declared, tmp_path / "nothing"), "nothing")
    wrong = cli("profile", "diff", declared, other, "--fail-above", "lots")
    assert_one_error(wrong, "fail-above: expected a share", "'lots'")


@pytest.mark.parametrize(("text", "share"), [("3%", 0.03), ("0.03", 0.03), ("0", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-1%", "nan", "inf", "3 %%"])
def test_no_shares(text: str) -> None:
    with pytest.raises(OptionError):
        parse_share(text)


def test_lint(cli: Run, measured_file: Path, tmp_path: Path) -> None:
    assert cli("profile", "lint", measured_file).exit_code == 0
    profile = Profile.load(measured_file)
    executor = profile.executors[0]
    first, *others = executor.segments
    executor = executor.model_copy(
        update={"segments": (first.model_copy(update={"host_syncs": 3}), *others)}
    )
    bad = tmp_path / "bad.json"
    profile.model_copy(update={"executors": (executor,)}).save(bad)
    done = cli("profile", "lint", bad)
    assert done.exit_code == 1
    assert "error: host-sync: round B=1: forward: 3 host synchronizations" in done.stdout
    found = json.loads(cli("profile", "lint", bad, "--json").stdout)["findings"]
    assert "host-sync" in {one["rule"] for one in found}
    assert cli("profile", "lint", bad, "--ignore", "host-sync").exit_code == 0
    assert_one_error(cli("profile", "lint", bad, "--ignore", "x"), "host-sync", "got x")
    shown = cli("profile", "lint", "--rules").stdout
    assert all(rule.id in shown for rule in rules())
    listed = document(cli("profile", "lint", "--rules", "--json"))
    assert [one["id"] for one in listed] == [rule.id for rule in rules()]
    assert cli("profile", "lint").exit_code == 2


def test_strict_lint_fails_on_warnings(cli: Run, measured_file: Path, tmp_path: Path) -> None:
    profile = Profile.load(measured_file)
    runs = (5, *[0] * (len(profile.executors) - 1))
    executors = tuple(
        found.model_copy(update={"replays": count})
        for found, count in zip(profile.executors, runs, strict=True)
    )
    idle = tmp_path / "idle.json"
    profile.model_copy(update={"executors": executors}).save(idle)
    assert cli("profile", "lint", idle).exit_code == 0
    assert cli("profile", "lint", idle, "--strict").exit_code == 1


# -- acceptance and export -------------------------------------------------------------------------


def test_acceptance_of_generated_text(cli: Run, tmp_path: Path) -> None:
    prompt = ("--prompts", "1", "--max-new-tokens", "24", "--draft-tokens", "3", "--json")
    generated = cli("demo", *prompt)
    path = tmp_path / "rounds.json"
    path.write_text(generated.stdout)
    found = document(cli("profile", "acceptance", path, "--json"))
    records = json.loads(generated.stdout)["prompts"][0]["rounds"]
    assert found["rounds"] == len(records) == sum(found["histogram"])
    assert found["committed"] == 23 and found["best_k"] is None
    costs = ("--cost", "1=1.0", "--cost", "3=10")
    best = document(cli("profile", "acceptance", path, *costs, "--json"))["best_k"]
    assert best["draft_tokens"] == 1 and best["is_resolved"]
    shown = cli("profile", "acceptance", path, *costs).stdout
    assert "survival" in shown and "expected best: K = 1" in shown


def test_acceptance_takes_costs_of_profiles(
    cli: Run, measured_file: Path, rounds_file: Path
) -> None:
    costs = ("--cost-of", measured_file, "--cost", "1=1000000")
    found = document(cli("profile", "acceptance", rounds_file, *costs, "--json"))
    measured = Profile.load(measured_file).executors[0].measured
    assert measured is not None
    by_k = {one["draft_tokens"]: one["ms"] for one in found["best_k"]["candidates"]}
    assert by_k == {1: 1e6, 7: pytest.approx(measured.median / 1e3)}


def test_what_acceptance_refuses(
    cli: Run, declared: Path, rounds_file: Path, tmp_path: Path
) -> None:
    acceptance = ("profile", "acceptance")
    assert_one_error(cli(*acceptance, declared), "without any")
    assert_one_error(cli(*acceptance, tmp_path / "nothing.json"), "nothing.json")
    (tmp_path / "text.json").write_text("no json")
    assert_one_error(cli(*acceptance, tmp_path / "text.json"), "records of rounds")
    (tmp_path / "empty.json").write_text("{}")
    assert_one_error(cli(*acceptance, tmp_path / "empty.json"), "empty.json", "got none")
    assert_one_error(cli(*acceptance, rounds_file, "--cost", "3"), "K=MS", "'3'")
    assert_one_error(cli(*acceptance, rounds_file, "--cost", "3=-1"), "K in 0..7")
    assert_one_error(cli(*acceptance, rounds_file, "--cost-of", declared), "has no times")
    assert parse_cost("7=6.9") == (7, 6.9)


@pytest.mark.parametrize("text", ["7=inf", "7=-inf", "7=nan", "7=1e-320", "7=1e-300", "7=1e999"])
def test_costs_whose_speed_is_not_finite(cli: Run, rounds_file: Path, text: str) -> None:
    done = cli("profile", "acceptance", rounds_file, "--cost", text, "--json")
    assert_one_error(done, "cost: expected K=MS such as 7=6.9", repr(text))


@pytest.mark.parametrize("command", ["build", "what-if"])
@pytest.mark.parametrize("option", ["--ceiling", "--tflops"])
@pytest.mark.parametrize("value", ["inf", "nan", "1e308"])
def test_ceilings_that_are_not_finite(cli: Run, command: str, option: str, value: str) -> None:
    done = cli("profile", command, *DEMO, option, value)
    assert done.exit_code == 2 and "Error: " in done.stderr and option in done.stderr


def test_records_that_no_round_makes_are_one_error(cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    record = {"proposed": 10**9, "accepted": 1, "licensed": 2, "committed": 2}
    path.write_text(json.dumps({"rounds": [record]}))
    done = cli("profile", "acceptance", path)
    assert_one_error(done, str(path), "accepted <= proposed <= 15", str(record))


def test_export(cli: Run, measured_file: Path, tmp_path: Path) -> None:
    text = measured_file.read_text()
    assert cli("profile", "export", measured_file).stdout == text
    page = tmp_path / "page.html"
    done = cli("profile", "export", measured_file, "--format", "html", "-o", page)
    assert done.stdout == f"written to {page}\n"
    assert page.read_text().lower().startswith("<!doctype html>")
    trace = document(cli("profile", "export", measured_file, "--format", "trace"))
    assert trace["traceEvents"]
    assert document(cli("profile", "export", "--format", "schema")) == json_schema()
    assert cli("profile", "export").exit_code == 2
    lost = tmp_path / "nothing" / "page.html"
    assert_one_error(cli("profile", "export", measured_file, "-o", lost), str(lost))


# -- the program -----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("command", NAMES)
def test_help(cli: Run, command: str, columns: str) -> None:
    done = cli("profile", command, "--help", env={"COLUMNS": columns})
    assert done.exit_code == 0
    assert f"dflash-graph profile {command}" in done.stdout.partition("Examples:")[2]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_help_of_all(cli: Run, columns: str) -> None:
    summaries = cli("profile", "--help", env={"COLUMNS": columns}).stdout.partition("Commands:")[2]
    assert all(f"\n  {name} " in summaries for name in NAMES) and "..." not in summaries
    assert cli("profile").exit_code == 2


def test_help_of_a_ceiling_that_is_never_measured(cli: Run) -> None:
    shown = cli("profile", "what-if", "--help", env={"COLUMNS": "200"}).stdout
    assert f"What memory gives to reads. Default: {READ_CEILING}." in shown
    assert "--measure" not in shown


@pytest.mark.parametrize("command", ["show", "lint", "export", "acceptance"])
@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"schema_name": "dflash_graph.profile"}', "\x00\xff", "[" * 100_000],
    ids=["empty", "object", "head", "bytes", "deep"],
)
def test_damaged_files_are_one_error(cli: Run, tmp_path: Path, command: str, text: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text, encoding="latin-1")
    assert_one_error(cli("profile", command, path), str(path))


@pytest.mark.parametrize("command", ["list", "show", "lint", "acceptance"])
def test_a_profile_that_readers_cannot_use_is_one_line(
    cli: Run, measured_file: Path, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "spoilt.json"
    spoilt = json.loads(measured_file.read_text())
    del spoilt["identity"]["options"]["lowering"]
    path.write_text(json.dumps(spoilt))
    (tmp_path / "sound.json").write_bytes(measured_file.read_bytes())
    if command == "list":
        done = cli("profile", "list", tmp_path)
        assert done.exit_code == 0 and "sound.json" in done.stdout
        assert f"damaged: {path}: identity.options: " in done.stdout
    else:
        assert_one_error(cli("profile", command, path), str(path), "expected lowering, a text")


def test_the_installed_program(script: Path, program: Run, measured_file: Path) -> None:
    shown = program(script, "profile", "show", measured_file, COLUMNS="40", TERM="dumb")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "\x1b" not in shown.stdout and "unattributed" in shown.stdout
    assert program(script, "profile", "lint", "nothing.json").returncode == 1
    json.loads(program(script, "profile", "show", measured_file, "--json").stdout)


def test_a_terminal_gets_the_same_tables(script: Path, measured_file: Path) -> None:
    command = [script, "profile", "show", measured_file, "--by", "op"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parent, child = pty.openpty()
    running = subprocess.Popen(command, stdout=child, stderr=child, env={**os.environ})
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    assert running.wait() == 0
    assert seen.decode().replace("\r\n", "\n") == plain


def test_help_loads_no_torch(program: Run, script: Path) -> None:
    code = (
        "import sys; sys.argv[1:] = ['profile', 'build', '--help']\n"
        "from dflash_graph.cli import main\n"
        "code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = program(script.parent / "python", "-c", code)
    assert done.returncode == 0, done.stderr
