"""The program as a whole: entry points, help, errors, terminals."""

from __future__ import annotations

import ast
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from safetensors.torch import load_file, save_file
from typer.models import OptionInfo

import dflash_graph as dg
from dflash_graph import demo
from dflash_graph.cli import app
from dflash_graph.profiles import preset_names
from dflash_graph.state import StatePools

Run = Callable[..., Any]

COMMANDS = ("demo", "generate", "bench", "graph", "plan", "doctor", "profile", "autotune")
ESCAPE = "\x1b"


# -- entry points ----------------------------------------------------------------------------------


def test_console_script_and_module_are_the_same(program: Run, script: Path) -> None:
    help_texts = [
        program(*command, "--help")
        for command in ([script], [sys.executable, "-m", "dflash_graph"])
    ]
    assert [done.returncode for done in help_texts] == [0, 0]
    assert help_texts[0].stdout == help_texts[1].stdout
    assert all(name in help_texts[0].stdout for name in COMMANDS)


def test_help_loads_no_torch(program: Run) -> None:
    code = (
        "import sys; sys.argv[1:] = ['generate', '--help']; from dflash_graph.cli import main\n"
        "code = main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = program(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_public_names_are_lazy_and_complete() -> None:
    """What type checkers see is `__all__`, and each name is there."""
    tree = ast.parse(Path(dg.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name for one in block.body if isinstance(one, ast.ImportFrom) for alias in one.names
    }
    assert seen | {"__version__"} == set(dg.__all__) <= set(dir(dg))
    assert all(getattr(dg, name) is not None for name in dg.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = dg.nonsense


def commands() -> Iterator[tuple[str, Callable[..., None]]]:
    """Every command by its name, as it was registered."""
    apps = [("", app), *((group.typer_instance.info.name, group.typer_instance)
                         for group in app.registered_groups)]  # fmt: skip
    for prefix, one in apps:
        for command in one.registered_commands:
            yield f"{prefix} {command.name}".strip(), command.callback


def test_no_option_takes_its_name_from_a_metavar() -> None:
    """Releases 0.27 of typer call an option `--OP` that has no name of its own and the metavar OP;
    others call it `--op`. So one whose metavar spells its name says the name.
    """
    named = dict(commands())
    wrong = [
        f"{name} --{parameter}"
        for name, callback in named.items()
        for parameter, hint in get_type_hints(callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo)
        and (option.metavar or "").replace("-", "_").lower() == parameter
        # In an annotation the first name stands where a default would.
        and not str(option.default).startswith("--")
    ]
    assert len(named) > 15 and not wrong


def test_version(cli: Run) -> None:
    done = cli("--version")
    assert (done.exit_code, done.stdout) == (0, f"dflash-graph {dg.__version__}\n")


def test_exit_codes_reach_the_shell(program: Run, script: Path) -> None:
    assert program(script, "plan", "--preset", "none").returncode == 1
    assert program(script, "nonsense").returncode == 2


def test_a_closed_pipe_is_no_traceback(script: Path) -> None:
    command = f"{script} graph --preset qwen3.5-27b-dflash2 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("forward backend=eager K=7")
    assert "Traceback" not in done.stderr


GENERATE = ("generate", demo.target_directory(), "--device", "cpu", "--lowering", "eager")
WRITING: dict[str, tuple[object, ...]] = {
    "text": ("plan", "--preset", "demo-dflash2"),
    "json": ("plan", "--preset", "demo-dflash2", "--json"),
    "graph": ("graph", "--preset", "demo-dflash2"),
    "tokens": (*GENERATE, "--prompt", "import os", "--max-new-tokens", "2"),
    "results": (*GENERATE, "--prompt", "import os", "--max-new-tokens", "2", "--json"),
    "help": ("plan", "--help"),
    "version": ("--version",),
}
NO_STDOUT = {">/dev/full": "No space left on device", ">&-": "Bad file descriptor"}


@pytest.mark.parametrize("redirection", NO_STDOUT)
@pytest.mark.parametrize("arguments", WRITING.values(), ids=WRITING)
def test_a_stdout_that_fails_is_one_error(
    program: Run, script: Path, arguments: tuple[object, ...], redirection: str
) -> None:
    command = (f'exec "$0" "$@" {redirection}', script, *arguments)
    done = program("sh", "-c", *command, PYTHONUNBUFFERED="")
    expected = f"error: stdout: expected a place to write, got {NO_STDOUT[redirection]}\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [({"PYTHONUNBUFFERED": "1"}, WRITING["text"]), ({"PYTHONIOENCODING": "ascii"}, ["--help"])],
    ids=["unbuffered", "ascii"],
)
def test_a_stdout_that_fails_however_it_is_opened(
    program: Run, script: Path, environment: dict[str, str], arguments: tuple[object, ...]
) -> None:
    done = program("sh", "-c", 'exec "$0" "$@" >/dev/full', script, *arguments, **environment)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        # Too little to be written before the program ends.
        ("print('x')", 1, "error: stdout: expected a place to write, got No space left on device"),
        ("os.write(os.open('/dev/full', os.O_WRONLY), b'x')", 1, "OSError: [Errno 28] No space "
         "left on device"),
    ],
    ids=["at exit", "another file"],
)  # fmt: skip
def test_which_failures_are_of_stdout(program: Run, body: str, code: int, last: str) -> None:
    source = (
        "import os, sys, dflash_graph.cli as program\n"
        f"program.app = lambda **_: {body}\n"
        "sys.exit(program.main())"
    )
    command = ("sh", "-c", 'exec "$0" "$@" >/dev/full', sys.executable, "-c", source)
    done = program(*command, PYTHONUNBUFFERED="")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, last)
    assert ("Traceback" in done.stderr) == last.startswith("OSError")


# -- help ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(cli: Run, command: str, columns: str) -> None:
    done = cli(command, "--help", env={"COLUMNS": columns})
    assert done.exit_code == 0
    assert f"dflash-graph {command}" in done.stdout.partition("Examples:")[2]
    assert ESCAPE not in done.stdout and "..." not in done.stdout.partition("Commands:")[2]


def test_help_of_the_program(cli: Run) -> None:
    summaries = cli("--help").stdout.partition("Commands:")[2]
    assert all(f"\n  {name} " in summaries for name in COMMANDS) and "..." not in summaries


def test_verbose_promises_what_there_is(cli: Run) -> None:
    """A second -v would be for messages of level debug."""
    sources = Path(dg.__file__).parent.rglob("*.py")
    has_debug = any("logger.debug(" in path.read_text(encoding="utf-8") for path in sources)
    assert ("twice" in cli("--help").stdout) == has_debug


def test_no_arguments_print_help(cli: Run) -> None:
    done = cli()
    assert done.exit_code == 2
    assert "Commands:" in done.output


# -- errors ----------------------------------------------------------------------------------------

USAGE = {
    "no such command": ["nonsense"],
    "unknown option": ["plan", "--nonsense"],
    "no models": ["plan"],
    "two kinds of models": ["plan", "--preset", "demo-dflash", "--target", "x"],
    "a draft beside a preset": ["graph", "--preset", "demo-dflash", "--draft", "x"],
    "K out of range": ["graph", "--preset", "demo-dflash", "--draft-tokens", "16"],
    "B out of range": ["graph", "--preset", "demo-dflash", "--batch", "0"],
    "not a number": ["demo", "--prompts", "many"],
    "no such draft": ["demo", "--draft", "eagle"],
    "no such format": ["graph", "--preset", "demo-dflash", "--format", "svg"],
    "no such depth": ["graph", "--preset", "demo-dflash", "--format", "dot", "--collapse", "x"],
    "costs have no picture": ["graph", "--preset", "demo-dflash", "--cost", "--format", "dot"],
    "no prompt": ["generate", "x"],
    "no target": ["generate", "--prompt", "x"],
    "bad ids": ["generate", "x", "--ids", "1,two"],
    "missing prompt file": ["generate", "x", "--prompt-file", "/nonexistent/prompt.txt"],
}


@pytest.mark.parametrize("arguments", USAGE.values(), ids=USAGE)
def test_usage_errors_exit_with_2(cli: Run, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2, done.output
    assert "Error: " in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def assert_one_error(done: Any, *words: str) -> None:
    assert done.exit_code == 1, done.output
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", ["graph", "plan"])
def test_unknown_preset_lists_what_ships(cli: Run, command: str) -> None:
    assert_one_error(cli(command, "--preset", "qwen"), *preset_names(), "'qwen'")


def test_unknown_region_lists_what_exists(cli: Run) -> None:
    done = cli("graph", "--preset", "demo-dflash2", "--region", "verify/layer.99")
    assert_one_error(done, "verify/layer.N/mixer", "'verify/layer.99'")


def test_unknown_executor_lists_what_exists(cli: Run) -> None:
    done = cli("plan", "--preset", "demo-dflash2", "--max-batch", "2", "--buffers", "3")
    assert_one_error(done, "1, 2, prefill, first_token", "'3'")


def test_missing_directories(cli: Run, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert_one_error(cli("generate", missing, "--prompt", "x"), str(missing / "config.json"))
    assert_one_error(cli("plan", "--target", missing), str(missing / "config.json"))
    pair = ("--target", demo.target_directory(), "--draft", missing)
    assert_one_error(cli("graph", *pair), str(missing / "config.json"))
    plain = ("--draft", missing, "--prompt", "x", "--plain")
    assert_one_error(cli(*GENERATE, *plain), str(missing / "config.json"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("graph", "--target", demo.target_directory()),
        ("plan", "--target", demo.target_directory()),
        (*GENERATE, "--prompt", "x"),
        (*GENERATE, "--prompt", "x", "--plain"),
    ],
    ids=["graph", "plan", "generate", "generate plainly"],
)
def test_drafts_need_a_draft(cli: Run, arguments: tuple[object, ...]) -> None:
    done = cli(*arguments, "--draft-tokens", "3")
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "--draft-tokens 3 needs a draft: give --draft" in done.stderr


def broken_target(folder: Path, spoil: Callable[[Path], None]) -> Path:
    """A target like the demo's with its weights spoiled."""
    folder.mkdir()
    for path in demo.target_directory().iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).symlink_to(path)
    weights = folder / "model.safetensors"
    weights.write_bytes((demo.target_directory() / "model.safetensors").read_bytes())
    spoil(weights)
    return folder


def cut(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-1000])


def garble(weights: Path) -> None:
    weights.write_bytes(b"\xff" * 64)


def lose_a_tensor(weights: Path) -> None:
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights)


@pytest.mark.parametrize("spoil", [cut, garble, lose_a_tensor])
def test_corrupted_checkpoints(cli: Run, tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    target = broken_target(tmp_path / "target", spoil)
    options = ("--prompt", "x", "--device", "cpu", "--lowering", "eager")
    assert_one_error(cli("generate", target, *options), str(target))


def test_what_the_engine_refuses(cli: Run) -> None:
    engine = ("generate", demo.target_directory(), "--device", "cpu", "--lowering", "eager")
    assert_one_error(cli(*engine, "--ids", "1,99999999"), "prompt[1]")
    assert_one_error(cli(*engine, "--prompt", ""), "prompt")
    assert_one_error(cli(*engine, "--ids", "1,2,3", "--max-context", "2"), "max_context")
    assert_one_error(cli(*engine, "--prompt", "x", "--public-vocab", "99999999"), "public_vocab")


# -- terminals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["plan", "--preset", "demo-dflash2"],
        ["graph", "--preset", "demo-dflash2"],
        ["demo", "--prompts", "1", "--max-new-tokens", "4"],
        ["plan", "--preset", "nothing"],
        ["plan", "--nonsense"],
    ],
    ids=lambda arguments: "-".join(arguments).replace("--", ""),
)
def test_narrow_and_without_escape_codes(cli: Run, arguments: list[str]) -> None:
    done = cli(*arguments, env={"COLUMNS": "40"})
    assert done.exit_code in (0, 1, 2)
    assert ESCAPE not in done.output and "Traceback" not in done.output


def on_a_terminal(command: list[str], **env: str) -> tuple[int, str]:
    """Run a command whose stdout and stderr are a terminal; returns its exit code and output."""
    controller, terminal = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=kept | env
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        output += part
    os.close(controller)
    return process.wait(), output.decode()


def test_a_terminal_gets_a_dimmed_prompt(script: Path) -> None:
    command = [str(script), "demo", "--prompt", "import \x07os\n", "--max-new-tokens", "4"]
    code, output = on_a_terminal(command, TERM="xterm")
    assert code == 0, output
    assert f"{ESCAPE}[2mimport \ufffdos" in output
    assert "--- continuation" not in output


def test_no_color_is_honoured(script: Path) -> None:
    command = [str(script), "demo", "--prompt", "import os\n", "--max-new-tokens", "4"]
    code, output = on_a_terminal(command, TERM="xterm", NO_COLOR="1")
    assert code == 0, output
    assert f"{ESCAPE}[2m" not in output
    assert "--- continuation" in output


# -- interruption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_interruption_prints_what_there_is(script: Path, as_json: bool) -> None:
    """Ctrl-C while requests run: their text so far, exit code 130, no traceback."""
    command = [
        str(script),
        "-v",
        "generate",
        str(demo.target_directory()),
        "--prompt",
        "import os\n",
    ]
    command += ["--prompt", "def f(", "--lowering", "eager", "--device", "cpu", "--ignore-eos"]
    command += ["--max-new-tokens", "100000", "--max-context", "200000", "--plain"]
    command += ["--json"] if as_json else []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell that starts tests in the background has SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stderr is not None
    if as_json:
        assert b"generating" in process.stderr.readline()
        first = b""
    else:
        first = process.stdout.read(24)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    output = (first + rest).decode()
    if as_json:
        document = json.loads(output)
        assert [one["finish_reason"] for one in document["results"]] == ["cancelled"] * 2
    else:
        assert output.startswith("--- 1 of 2\n") and "--- 2 of 2\n" in output
        assert b"ended by cancelled" in errors


def test_interruption_while_a_request_is_admitted(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the request has its slot, and still stands in the queue."""

    def interrupt(self: StatePools, slot: int) -> None:
        if slot == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(StatePools, "reset_slot", interrupt)
    options = ("--device", "cpu", "--lowering", "eager", "--ids", "5", "--ids", "6", "--json")
    done = cli("generate", demo.target_directory(), *options)
    assert done.exit_code == 130, done.output
    reasons = [one["finish_reason"] for one in json.loads(done.stdout)["results"]]
    assert reasons == ["cancelled"] * 2


def test_interruption_while_models_load(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dg.Engine, "load", interrupt)
    done = cli("generate", demo.target_directory(), "--ids", "5")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "error: interrupted\n")
