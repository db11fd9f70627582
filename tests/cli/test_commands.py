"""What each command prints: JSON keys, text, and that it is what the API gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dflash_graph as dg
from dflash_graph import demo, export
from dflash_graph.cli import doctor
from dflash_graph.cli.selection import Dtype, select_pair
from dflash_graph.lowering.schedules import lowered
from dflash_graph.models.round import declare_startup
from dflash_graph.passes.combine import combine
from dflash_graph.rounds import Rounds

Run = Callable[..., Any]

EAGER = ("--device", "cpu", "--lowering", "eager")
PAIR = ("--target", demo.target_directory(), "--draft", demo.draft_directory("dflash2"))
BIG = ("--preset", "qwen3.5-27b-dflash2")


def document(done: Any) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain() -> Iterator[dg.Engine]:
    """The demo target without a draft: what every text must equal."""
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=512)
    with dg.Engine.load(demo.target_directory(), None, options) as engine:
        yield engine


def text_of(engine: dg.Engine, prompt: str | list[int], tokens: int) -> dg.Generation:
    return engine.generate([prompt], dg.SamplingParams(max_new_tokens=tokens))[0]


# -- demo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", demo.DRAFT_KINDS)
def test_demo_text_is_that_of_plain_decoding(cli: Run, plain: dg.Engine, draft: str) -> None:
    done = cli("demo", "--prompts", "1", "--max-new-tokens", "24", "--draft", draft)
    assert done.exit_code == 0, done.output
    expected = text_of(plain, demo.prompts()[0], 24).text
    shown = done.stdout.partition("--- continuation\n")[2].partition("\n--- ")[0]
    assert expected is not None and shown.rstrip("\n") == expected.rstrip("\n")
    assert "24 tokens in" in done.stdout and "same text" in done.stdout


def test_demo_json(cli: Run) -> None:
    options = ("--prompt", "import os\n", "--prompt", "def f(", "--max-new-tokens", "12")
    found = document(cli("demo", *options, "--draft-tokens", "3", "--json"))
    assert found["options"]["draft_tokens"] == 3
    assert [one["prompt"] for one in found["prompts"]] == ["import os\n", "def f("]
    for one in found["prompts"]:
        assert one["is_equal"] and len(one["token_ids"]) == 12
        assert sum(record["committed"] for record in one["rounds"]) == 11
        assert one["plain"]["tokens_per_second"] > 0
    total = found["total"]
    assert total["tokens"] == 24 and total["is_equal"] and total["speedup"] > 0
    assert total["rounds"] == sum(len(one["rounds"]) for one in found["prompts"])


def test_demo_of_one_token_has_no_rounds(cli: Run) -> None:
    found = document(cli("demo", "--prompts", "1", "--max-new-tokens", "1", "--json"))
    assert found["total"] == {
        "tokens": 1,
        "rounds": 0,
        "tokens_per_round": 0.0,
        "tokens_per_second": 0.0,
        "plain_tokens_per_second": 0.0,
        "speedup": None,
        "is_equal": True,
    }


# -- generate --------------------------------------------------------------------------------------


def generate(cli: Run, *arguments: object, **options: object) -> Any:
    draft = ("--draft", demo.draft_directory("dflash2"))
    return cli("generate", demo.target_directory(), *draft, *EAGER, *arguments, **options)


def test_generate_from_text_ids_files_and_stdin(cli: Run, plain: dg.Engine, tmp_path: Path) -> None:
    text = tmp_path / "prompt.txt"
    text.write_text("import sys\n")
    several = tmp_path / "prompts.json"
    several.write_text(json.dumps(["class A", [5, 6, 7]]))
    arguments = ("--prompt", "import os\n", "--ids", "8,9", "--ids", "10")
    files = ("--prompt-file", text, "--prompt-file", several, "--prompt-file", "-")
    done = generate(cli, *arguments, *files, "--max-new-tokens", "6", "--json", input='["def f("]')
    prompts = ["import os\n", "import sys\n", "class A", [5, 6, 7], "def f(", [8, 9], [10]]
    found = document(done)["results"]
    expected = [text_of(plain, prompt, 6) for prompt in prompts]
    assert [one["token_ids"] for one in found] == [list(one.token_ids) for one in expected]
    assert [one["text"] for one in found] == [one.text for one in expected]


def test_generate_streams_a_single_text(cli: Run, plain: dg.Engine) -> None:
    done = generate(cli, "--prompt", "import os\n", "--max-new-tokens", "24")
    expected = text_of(plain, "import os\n", 24).text
    assert expected is not None and done.exit_code == 0
    assert done.stdout == expected + "\n" * (not expected.endswith("\n"))
    assert done.stderr.startswith("--- 24 tokens in ")


def test_generate_prints_several_in_order(cli: Run, plain: dg.Engine) -> None:
    prompts = ["import os\n", "def f(", "class A:\n    def"]
    arguments = [part for prompt in prompts for part in ("--prompt", prompt)]
    done = generate(cli, *arguments, "--max-new-tokens", "9", "--max-batch", "2")
    expected = ""
    for index, prompt in enumerate(prompts):
        text = text_of(plain, prompt, 9).text
        assert text is not None
        expected += f"--- {index + 1} of 3\n{text}" + "\n" * (not text.endswith("\n"))
    assert (done.exit_code, done.stdout) == (0, expected)


def test_generate_without_a_tokenizer_prints_ids(
    cli: Run, plain: dg.Engine, tmp_path: Path
) -> None:
    for path in demo.target_directory().iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    done = cli("generate", tmp_path, *EAGER, "--ids", "5,6,7", "--max-new-tokens", "5")
    expected = " ".join(str(token) for token in text_of(plain, [5, 6, 7], 5).token_ids)
    assert (done.exit_code, done.stdout) == (0, f"{expected}\n")
    done = cli("generate", tmp_path, *EAGER, "--prompt", "x")
    assert done.exit_code == 1 and "tokenizer.json" in done.stderr


def test_generate_json(cli: Run) -> None:
    arguments = ("--prompt", "import os\n", "--max-new-tokens", "8", "--draft-tokens", "2")
    found = document(generate(cli, *arguments, "--json"))
    assert set(found) == {"target", "draft", "options", "sampling", "results", "timings"}
    assert found["options"]["draft_tokens"] == 2 and found["options"]["max_batch"] == 1
    assert found["sampling"]["max_new_tokens"] == 8
    assert set(found["timings"]) >= {"load_seconds", "generate_seconds", "tokens_per_second"}
    (one,) = found["results"]
    assert one["finish_reason"] == "length" and one["error"] is None
    assert all(record["proposed"] <= 2 for record in one["rounds"])
    assert one["tokens_per_round"] == 7 / len(one["rounds"])


def test_generate_options_reach_the_engine(cli: Run, plain: dg.Engine) -> None:
    ids = text_of(plain, "import os\n", 8).token_ids
    stop = ("--stop-token-id", ids[3], "--ignore-eos")
    found = document(generate(cli, "--prompt", "import os\n", *stop, "--json"))
    (one,) = found["results"]
    assert one["token_ids"] == list(ids[: ids.index(ids[3]) + 1])
    assert one["finish_reason"] == "stop" and found["sampling"]["ignore_eos"]
    found = document(
        generate(cli, "--prompt", "import os\n", "--plain", "--max-new-tokens", "4", "--json")
    )
    assert found["options"]["speculative"] is False
    assert [record["proposed"] for record in found["results"][0]["rounds"]] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.json", "[1, 2]", "got 1 at 0"),
        ("list.txt", '["x", {"a": 1}]', 'got {"a": 1} at 1'),
        ("ids.json", '[["a"]]', 'got ["a"] at 0'),
        ("object.json", '{"a": 1}', "expected a list"),
        ("broken.json", "[", "is not JSON"),
        ("deep.json", "[" * 100_000, "is not JSON"),
        ("digits.json", f"[[{'7' * 5000}]]", "is not JSON"),
        ("bytes.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_prompt_files_that_are_refused(
    cli: Run, tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = cli("generate", "x", "--prompt-file", path)
    assert done.exit_code == 2
    assert message in done.stderr


# -- bench -----------------------------------------------------------------------------------------

RANDOM = ("--geometry", "demo-dflash2", "--random-weights")


@pytest.mark.parametrize(
    "arguments",
    [
        RANDOM,
        (*RANDOM, "--json"),
        (*RANDOM, "--lowering", "eager", "--no-cuda-graphs", "--batch", 8, "--ops"),
        PAIR,
        ("--target", "/nonexistent"),
    ],
)
def test_bench_without_a_device_is_one_error(
    cli: Run, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli("bench", *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: device: expected 'cpu' (torch sees no CUDA device), got 'cuda'\n"


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_bench_has_no_times_of_ops_that_are_no_launches(
    cli: Run, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = cli("bench", *RANDOM, "--lowering", lowering, "--ops")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ops: expected lowering 'triton'")
    assert done.stderr.endswith(f"got '{lowering}'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --geometry or --target"),
        ((*RANDOM, "--draft", "x"), "--draft goes with --target"),
        ((*RANDOM, "--target", "x"), "give either --geometry or --target"),
        (("--geometry", "demo-dflash2"), "--random-weights goes with it alone"),
        (("--target", "x", "--random-weights"), "--random-weights goes with it alone"),
        ((*RANDOM, "--batch", 0), "--batch"),
        ((*RANDOM, "--batch", 1, "--batch", 9), "--batch"),
        ((*RANDOM, "--draft-tokens", 0), "--draft-tokens"),
        ((*RANDOM, "--draft-tokens", 16), "--draft-tokens"),
        ((*RANDOM, "--context", 0), "--context"),
        ((*RANDOM, "--turns", 1), "--turns"),
        ((*RANDOM, "--lowering", "cublas"), "--lowering"),
        ((*RANDOM, "--dtype", "float16"), "--dtype"),
    ],
)
def test_bench_options_that_are_refused(
    cli: Run, arguments: tuple[object, ...], message: str
) -> None:
    done = cli("bench", *arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert message in done.stderr and "Traceback" not in done.stderr


# -- graph -----------------------------------------------------------------------------------------


def big_forward() -> Any:
    pair, tokens = select_pair("qwen3.5-27b-dflash2", None, None, None, Dtype.bfloat16)
    return dg.declare_round(pair, "eager", draft_tokens=tokens, batch=1).forward


def test_graph_prints_what_the_api_exports(cli: Run) -> None:
    graph = big_forward()
    assert cli("graph", *BIG).stdout == export.to_text(graph)
    assert cli("graph", *BIG, "--json").stdout == export.to_json(graph)
    dot = cli("graph", *BIG, "--format", "dot").stdout
    assert dot == export.to_dot(graph, collapse="layers")
    mermaid = cli("graph", *BIG, "--format", "mermaid", "--collapse", "1").stdout
    assert mermaid == export.to_mermaid(graph, collapse=1)


def test_graph_of_directories_is_the_one_that_runs(cli: Run) -> None:
    options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=2, max_context=128)
    with dg.Engine.demo(options) as engine:
        graphs = engine.rounds[2].compiled.graphs
    for graph in graphs:
        arguments = ("--segment", graph.key.segment, "--batch", "2", "--dtype", "float32")
        found = document(cli("graph", *PAIR, *arguments, "--json"))
        assert found["hash"] == graph.content_hash


KERNELS = (*BIG, "--backend", "triton")


@pytest.mark.parametrize("segment", ["forward", "finish", "prefill", "first_token"])
@pytest.mark.parametrize("backend", ["eager", "inductor", "triton"])
def test_graph_is_the_one_a_startup_plans(cli: Run, backend: str, segment: str) -> None:
    pair = select_pair("demo-dflash2", None, None, None, Dtype.bfloat16)[0]
    sizes = {"draft_tokens": 7, "max_batch": 1, "prefill_chunk": 64}
    names = {"prefill": "prefill 64", "first_token": "first token"}
    startup = declare_startup(pair, backend, **sizes)  # type: ignore[arg-type]
    graphs = startup[names.get(segment, "round B=1")]
    (graph,) = (one for one in graphs if one.key.segment == segment)
    arguments = ("--preset", "demo-dflash2", "--backend", backend, "--segment", segment)
    found = cli("graph", *arguments, "--prefill-chunk", "64").stdout
    assert found == export.to_text(lowered(graph).graph)
    declared = cli("graph", *arguments, "--prefill-chunk", "64", "--declared").stdout
    assert declared == export.to_text(graph)
    is_combined = backend == "triton" and segment in ("forward", "finish")
    assert (found != declared) == is_combined


def test_graph_of_kernels_is_combined_in_every_form(cli: Run) -> None:
    pair, tokens = select_pair("qwen3.5-27b-dflash2", None, None, None, Dtype.bfloat16)
    declared = dg.declare_round(pair, "triton", draft_tokens=tokens, batch=1).forward
    for arguments, graph in (((), combine(declared)), (("--declared",), declared)):
        shown = {
            form: cli("graph", *KERNELS, *arguments, "--format", form).stdout
            for form in ("text", "json", "dot", "mermaid")
        }
        assert shown["text"] == export.to_text(graph)
        assert shown["json"] == export.to_json(graph)
        assert shown["dot"] == export.to_dot(graph, collapse="layers")
        assert shown["mermaid"] == export.to_mermaid(graph, collapse="layers")
        cost = document(cli("graph", *KERNELS, *arguments, "--cost", "--json"))
        assert (cost["hash"], cost["total"]["nodes"]) == (graph.content_hash, len(graph.nodes))
    region = cli("graph", *KERNELS, "--region", "verify/layer.3").stdout
    assert "gated_attention" in region and "attention_gate" not in region


@pytest.mark.parametrize("segment", ["forward", "finish", "prefill", "first_token"])
def test_graph_segments_and_plain_decoding(cli: Run, segment: str) -> None:
    done = cli("graph", "--preset", "demo-dflash", "--segment", segment, "--draft-tokens", "0")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{segment} backend=eager K=0")
    assert "$draft" not in done.stdout


def test_graph_region(cli: Run) -> None:
    found = document(cli("graph", *BIG, "--region", "verify/layer.3", "--json"))
    assert found["nodes"]
    assert all(node["region"].startswith("verify/layer.3/") for node in found["nodes"])
    assert found["key"]["segment"] == "forward:verify/layer.3"
    assert found["hash"] != big_forward().content_hash
    text = cli("graph", *BIG, "--region", "verify/layer.3/ffn").stdout
    assert "layer.30" not in text and "ffn" in text


def test_graph_cost_adds_up(cli: Run) -> None:
    arguments = ("--cost", "--context", "8192")
    found = document(cli("graph", *BIG, *arguments, "--json"))
    costs = big_forward().cost(context=8192).values()
    assert found["total"]["read_bytes"] == sum(cost.read_bytes for cost in costs)
    for key, total in found["total"].items():
        assert total == sum(region[key] for region in found["regions"])
    text = cli("graph", *BIG, *arguments).stdout
    assert "verify/layer.*/mixer" in text and text.splitlines()[-1].startswith("total")


# -- plan ------------------------------------------------------------------------------------------


def test_plan_of_the_27b_preset(cli: Run) -> None:
    found = document(cli("plan", *BIG, "--max-batch", "2", "--json"))
    assert found["total_bytes"] == (
        found["weights"]["nbytes"]
        + found["state"]["nbytes"]
        + found["arena_bytes"]
        + found["frame_bytes"]
    )
    assert 50e9 < found["weights"]["target"] < 55e9
    names = [executor["name"] for executor in found["executors"]]
    assert names == [
        *("round B=1", "sampling B=1", "round B=2", "sampling B=2"),
        *("prefill 1024", "prefill with embeddings 1024", "first token", "sampled first token"),
        "catch-up",
    ]
    text = cli("plan", *BIG, "--max-batch", "2").stdout
    assert str(found["total_bytes"]) in text and all(name in text for name in names)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_plan_is_what_the_engine_allocates(
    cli: Run, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rounds, "_warm_up", lambda self, progress: None)  # compiles nothing
    numbers = {"max_batch": 2, "max_context": 512, "prefill_chunk": 128}
    options = dg.EngineOptions(device="cpu", lowering=backend, **numbers)  # type: ignore[arg-type]
    arguments = [
        part for name, value in numbers.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    arguments += ["--dtype", "float32", "--backend", backend]
    found = document(cli("plan", *PAIR, *arguments, "--json"))
    with dg.Engine.demo(options) as engine:
        assert found["arena_bytes"] == engine.rounds.arena.numel()
        assert found["state"]["nbytes"] == engine.rounds.state.storage.numel()
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in engine.rounds.model.weights.values()
        }
        assert found["weights"]["nbytes"] == sum(storages.values())


def test_plan_has_the_ops_that_kernels_compute(cli: Run) -> None:
    arguments = ("plan", *KERNELS, "--max-batch", "1", "--buffers", "1", "--json")
    steps = 0
    for segment in ("forward", "finish"):
        steps += len(document(cli("graph", *KERNELS, "--segment", segment, "--json"))["nodes"])
    assert document(cli(*arguments))["steps"] == steps


def test_plan_for_a_device_that_was_measured(cli: Run) -> None:
    triton = ("plan", *BIG, "--backend", "triton", "--json")
    measured = document(cli(*triton, "--device-profile", "NVIDIA H200"))
    assert measured["arena_bytes"] > 0
    assert measured["state"] == document(cli(*triton))["state"]
    refused = cli("plan", *BIG, "--device-profile", "NVIDIA H201")
    assert refused.exit_code == 1
    assert "device-profile: expected one of 'NVIDIA H200'" in refused.output


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("command", ["plan", "profile build", "profile what-if"])
def test_choices_of_kernels_are_for_triton(cli: Run, command: str, backend: str) -> None:
    arguments = ("--preset", "demo-dflash2", "--device-profile", "NVIDIA H200")
    done = cli(*command.split(), *arguments, "--backend", backend)
    assert (done.exit_code, done.stdout) == (1, "")
    expected = f"expected --backend triton (it has kernels), got {backend}"
    assert done.stderr == f"error: device-profile: {expected}\n"


@pytest.mark.parametrize("name", ["1", "2", "prefill", "first_token", "sampling B=2", "catch-up"])
def test_plan_buffers(cli: Run, name: str) -> None:
    arguments = ("plan", "--preset", "demo-dflash2", "--max-batch", "2", "--buffers", name)
    found = document(cli(*arguments, "--json"))
    ends = [buffer["offset"] + buffer["nbytes"] for buffer in found["buffers"]]
    assert max(ends) <= found["arena_bytes"]
    text = cli(*arguments).stdout
    assert text.startswith(found["executor"])
    assert all(buffer["values"][0] in text for buffer in found["buffers"])


def test_plan_without_speculation_has_no_draft(cli: Run) -> None:
    found = document(cli("plan", "--target", demo.target_directory(), "--json"))
    assert "draft" not in found["weights"]
    found = document(cli("plan", *PAIR, "--draft-tokens", "0", "--json"))
    assert "draft" not in found["weights"]


# -- autotune --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--geometry", "demo-dflash2"),
        ("export", "-"),
        ("show",),
        ("show", "nvidia-h200.json"),
    ],
    ids=" ".join,
)
def test_a_device_that_nobody_measured_lists_what_is_known(
    cli: Run, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_GRAPH_PROFILES", str(tmp_path))
    done = cli("autotune", *arguments, "--device", "nope")
    assert (done.exit_code, done.stdout) == (1, "")
    expected = "expected one that there are profiles of ('NVIDIA H200'), got 'nope'"
    assert done.stderr == f"error: device: {expected}\n"


def test_show_is_of_all_devices_by_default(cli: Run) -> None:
    option = cli("autotune", "show", "--help", env={"COLUMNS": "200"}).stdout.partition("--device")
    assert "Default: of all." in option[2] and "this machine's" not in option[2]


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor(cli: Run) -> None:
    found = document(cli("doctor", "--json"))
    assert found["is_usable"]
    names = [check["name"] for check in found["checks"]]
    assert {"python", "torch", "triton", "c++", "cache", "demo", "self-check"} <= set(names)
    assert {check["status"] for check in found["checks"]} <= {"ok", "warn"}
    lines = cli("doctor").stdout.splitlines()
    assert [line.split()[1] for line in lines] == names


def test_doctor_lists_cuda_devices(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="A card", major=9, minor=0, total_memory=140 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    checks = {check["name"]: check for check in document(cli("doctor", "--json"))["checks"]}
    for name in ("cuda:0", "cuda:1"):
        assert checks[name]["status"] == "ok"
        assert checks[name]["detail"] == "A card, capability 9.0, 140.0 GiB"


def test_doctor_fails_where_something_needed_does(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "target_directory", lambda: tmp_path)
    monkeypatch.setattr(doctor, "_needed", lambda: ["torch", "no-such-package"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = cli("doctor", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    status = {check["name"]: check["status"] for check in found["checks"]}
    assert not found["is_usable"]
    assert status["demo"] == status["no-such-package"] == "fail"
    assert status["c++"] == "warn" and status["torch"] == status["self-check"] == "ok"


@pytest.mark.parametrize(
    ("name", "found", "status", "least"),
    [
        ("rich", "1.0.0", "fail", "13.7"),
        ("rich", "13.6.9", "fail", "13.7"),
        ("rich", "13.7", "ok", ""),
        ("rich", "13.7.1rc1+local", "ok", ""),
        ("platformdirs", "4.0.0", "ok", ""),
        ("triton", "3.5.1", "warn", "3.6"),
        ("triton", "3.10", "ok", ""),
    ],
)
def test_doctor_compares_versions(
    cli: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    found: str,
    status: str,
    least: str,
) -> None:
    metadata = tmp_path / f"{name}-{found}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = cli("doctor", "--json")
    assert done.exit_code == (status == "fail")
    (check,) = (check for check in json.loads(done.stdout)["checks"] if check["name"] == name)
    assert check["status"] == status and check["detail"].startswith(found)
    assert check["detail"] == found or f"expected at least {least}: " in check["detail"]


def test_doctor_understands_every_requirement() -> None:
    """It reads lower bounds alone."""
    stated = requires("dflash-graph")
    assert stated is not None and set(doctor._needed()) <= set(stated)
    assert all(re.fullmatch(r"[\w.-]+>=\d+(\.\d+)*", line) for line in doctor._needed())
    for name in doctor._OPTIONAL:
        assert re.fullmatch(rf"{name}>=\d+(\.\d+)*", doctor._optional(name))


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("cache", "TORCHINDUCTOR_CACHE_DIR"),
        ("kernels", "DFLASH_GRAPH_CACHE"),
        ("profiles", "DFLASH_GRAPH_PROFILES"),
    ],
)
def test_doctor_tries_each_folder(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, variable: str
) -> None:
    def check_of(folder: Path) -> dict[str, str]:
        monkeypatch.setenv(variable, str(folder))
        checks = document(cli("doctor", "--json"))["checks"]
        (check,) = (check for check in checks if check["name"] == name)
        return dict(check)

    file = tmp_path / "file"
    file.touch()
    folder = tmp_path / "not" / "there"
    assert check_of(folder) == {"name": name, "status": "ok", "detail": str(folder)}
    assert not folder.parent.exists()
    below = {"status": "warn", "detail": f"{file / 'x'}; not writable, set {variable}"}
    assert check_of(file / "x") == {"name": name, **below}
    check = check_of(file)
    assert check["status"] == "warn" and variable in check["detail"]
