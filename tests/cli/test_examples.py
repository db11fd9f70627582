"""Every example of the help texts and of the README runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.cli import app, autotune, bench, demo, doctor, generate, graph, plan, profile

README = Path(__file__).parents[2] / "README.md"

Run = Callable[..., Any]

#: Options that make an example quick, after it; the example itself is run as it stands.
SHORT = ("--device", "cpu", "--lowering", "eager", "--max-new-tokens", "4")
SHORT_BENCH = ("--context", "512", "--turns", "2")
DEMO_BENCH = ("--geometry", "demo-dflash2", *SHORT_BENCH)

#: Example -> options that are added when it is run, or None where it stays as it is.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "dflash-graph demo": ("--max-new-tokens", "4"),
    'dflash-graph demo --draft dflash --prompt "import os"': ("--max-new-tokens", "4"),
    # What compiles takes a minute; tests of the lowering are elsewhere.
    "dflash-graph demo --prompts 1 --lowering inductor": SHORT,
    'dflash-graph generate TARGET_DIR --draft DRAFT_DIR --prompt "import os"': SHORT,
    "dflash-graph generate TARGET_DIR --draft DRAFT_DIR --ids 12,7,301 --json": SHORT,
    'dflash-graph generate TARGET_DIR --prompt "import os" --temperature 0.8 --top-p 0.95 '
    "--seed 7": SHORT,
    "cat prompt.txt | dflash-graph generate TARGET_DIR --prompt-file - --lowering eager": SHORT,
    "dflash-graph generate --help": (),
    "dflash-graph graph --preset qwen3.5-27b-dflash2 --region verify/layer.3": (),
    "dflash-graph graph --preset demo-dflash2 --format dot": (),
    "dflash-graph graph --preset demo-dflash2 --backend triton --declared": (),
    "dflash-graph graph --preset qwen3.5-27b-dflash2 --cost --context 8192": (),
    "dflash-graph graph --target TARGET_DIR --draft DRAFT_DIR --segment finish": (),
    "dflash-graph plan --preset qwen3.5-27b-dflash2": (),
    "dflash-graph plan --preset qwen3.5-27b-dflash2 --max-batch 8 --max-context 32768": (),
    "dflash-graph plan --preset qwen3.5-27b-dflash2 --backend triton "
    '--device-profile "NVIDIA H200"': ("--max-batch", "1"),
    "dflash-graph plan --preset demo-dflash2 --buffers 4": (),
    "dflash-graph plan --target TARGET_DIR --draft DRAFT_DIR --json": (),
    "dflash-graph doctor": (),
    "dflash-graph doctor --json": (),
    **dict.fromkeys(
        (
            "dflash-graph profile build --help",
            "dflash-graph profile show --help",
            "dflash-graph profile build --preset demo-dflash2 -o declared.json",
            "dflash-graph profile build --preset qwen3.5-27b-dflash2 --backend triton "
            "--max-batch 1",
            "dflash-graph profile what-if --preset demo-dflash2 --tree-width 2 "
            "--acceptance rounds.json",
            "dflash-graph profile list",
            "dflash-graph profile list PROFILES_DIR --json",
            "dflash-graph profile show measured.json",
            'dflash-graph profile show measured.json --executor "round B=1" --by op',
            "dflash-graph profile show measured.json --node verify/layer.0/ffn/down",
            "dflash-graph profile diff measured.json measured.json",
            "dflash-graph profile diff measured.json measured.json --fail-above 3%",
            "dflash-graph profile lint measured.json",
            "dflash-graph profile lint measured.json --ignore default-config --strict",
            "dflash-graph profile lint --rules",
            "dflash-graph profile acceptance rounds.json",
            "dflash-graph profile acceptance rounds.json --cost 3=6.1 --cost 7=6.9",
            "dflash-graph profile export measured.json --format html -o profile.html",
            "dflash-graph profile export measured.json --format trace -o trace.json",
            "dflash-graph profile export --format schema",
        ),
        (),
    ),
    "dflash-graph profile build --preset demo-dflash2 --measure --max-batch 1 -o measured.json": (
        *("--turns", "2", "-o", "timed.json"),
    ),
    "dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --draft-tokens 3 --draft-tokens 7": (
        "--max-batch",
        "1",
    ),
    "dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --max-batch 4 --memory 80GB": (),
    "dflash-graph profile what-if --preset qwen3.5-27b-dflash2 --tree-width 1 --tree-width 2": (
        "--max-batch",
        "1",
    ),
    **dict.fromkeys(
        (
            "dflash-graph autotune run --help",
            "dflash-graph autotune status",
            "dflash-graph autotune run --geometry demo-dflash2 --draft-tokens 15 --list",
            "dflash-graph autotune status --json",
            'dflash-graph autotune status --geometry qwen3.5-27b-dflash2 --device "NVIDIA H200"',
            "dflash-graph autotune show",
            "dflash-graph autotune show nvidia-h200.json --json",
            "dflash-graph autotune diff nvidia-h200.json CHOICES",
            "dflash-graph autotune merge MERGED CHOICES nvidia-h200.json",
            "dflash-graph autotune prune --dry-run",
            "dflash-graph autotune prune CHOICES",
            'dflash-graph autotune export - --device "NVIDIA H200"',
            'dflash-graph autotune export EXPORTED --device "NVIDIA H200"',
        ),
        (),
    ),
}

#: The same for examples that need a CUDA device.
CUDA_EXAMPLES: dict[str, tuple[str, ...]] = {
    "dflash-graph bench --geometry qwen3.5-27b-dflash2 --random-weights": DEMO_BENCH,
    "dflash-graph bench --geometry demo-dflash2 --random-weights --batch 1 --batch 8 --ops": (
        DEMO_BENCH
    ),
    "dflash-graph bench --target TARGET_DIR --draft DRAFT_DIR --context 4096 --json": SHORT_BENCH,
    "dflash-graph autotune run --geometry qwen3.5-27b-dflash2 --budget 600s": (
        *("--geometry", "demo-dflash2", "--op", "rms_norm", "--context", "64"),
    ),
    "dflash-graph autotune run --geometry qwen3.5-27b-dflash2 --devices 0,1": (
        *("--geometry", "demo-dflash2", "--op", "rms_norm", "--context", "64", "--devices", "0"),
    ),
    "dflash-graph autotune run --geometry demo-dflash2 --op linear_norm --json": ("--budget", "9s"),
}


def shown() -> set[str]:
    """Every example of a help text, and every command line in a code block of the README."""
    commands = (demo, generate, bench, graph, plan, doctor, profile, autotune)
    texts = [app.info.epilog or "", *(command.EPILOG for command in commands)]
    texts += re.findall(r"^```sh\n(.*?)^```", README.read_text(), flags=re.M | re.S)
    lines = [line.partition("  #")[0].strip() for text in texts for line in text.splitlines()]
    return {line for line in lines if "dflash-graph " in line}


def test_the_table_has_every_example() -> None:
    assert shown() == set(EXAMPLES) | set(CUDA_EXAMPLES)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "|" not in example])
def test_example_runs(
    cli: Run, example: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(example)
    done = cli(*arguments, *EXAMPLES[example])
    assert (program, done.exit_code) == ("dflash-graph", 0), done.output
    assert done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("example", CUDA_EXAMPLES)
def test_example_runs_on_a_device(
    cli: Run, example: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(example)
    done = cli(*arguments, *CUDA_EXAMPLES[example])
    assert (program, done.exit_code) == ("dflash-graph", 0), done.output
    assert done.stdout


@pytest.mark.parametrize("example", CUDA_EXAMPLES)
def test_example_without_a_device_is_one_error(
    cli: Run, example: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = cli(*shlex.split(example)[1:])
    assert (done.exit_code, done.stdout) == (1, "")
    said = {
        "bench": "device: expected 'cpu' (torch sees no CUDA device), got 'cuda'",
        "autotune": "autotune run: expected a CUDA device to measure on, got none (torch sees no "
        "CUDA device); --list and the other commands need none",
    }
    assert done.stderr == f"error: {said[example.split()[1]]}\n"


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "|" in example])
def test_example_runs_in_a_shell(example: str, folder: Path, script: Path) -> None:
    done = subprocess.run(
        " ".join((example, *EXAMPLES[example])),
        shell=True,
        cwd=folder,
        env=os.environ | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
