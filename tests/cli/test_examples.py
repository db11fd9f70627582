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

from dflash_graph.cli import app, demo, doctor, generate, graph, plan

README = Path(__file__).parents[2] / "README.md"

Run = Callable[..., Any]

#: Options that make an example quick, after it; the example itself is run as it stands.
SHORT = ("--device", "cpu", "--lowering", "eager", "--max-new-tokens", "4")

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
    "dflash-graph graph --preset qwen3.5-27b-dflash2 --cost --context 8192": (),
    "dflash-graph graph --target TARGET_DIR --draft DRAFT_DIR --segment finish": (),
    "dflash-graph plan --preset qwen3.5-27b-dflash2": (),
    "dflash-graph plan --preset qwen3.5-27b-dflash2 --max-batch 8 --max-context 32768": (),
    "dflash-graph plan --preset demo-dflash2 --buffers 4": (),
    "dflash-graph plan --target TARGET_DIR --draft DRAFT_DIR --json": (),
    "dflash-graph doctor": (),
    "dflash-graph doctor --json": (),
}


def shown() -> set[str]:
    """Every example of a help text, and every command line in a code block of the README."""
    texts = [app.info.epilog or "", *(m.EPILOG for m in (demo, generate, graph, plan, doctor))]
    texts += re.findall(r"^```sh\n(.*?)^```", README.read_text(), flags=re.M | re.S)
    lines = [line.partition("  #")[0].strip() for text in texts for line in text.splitlines()]
    return {line for line in lines if "dflash-graph " in line}


def test_the_table_has_every_example() -> None:
    assert shown() == set(EXAMPLES)


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "|" not in example])
def test_example_runs(
    cli: Run, example: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    program, *arguments = shlex.split(example)
    done = cli(*arguments, *EXAMPLES[example])
    assert (program, done.exit_code) == ("dflash-graph", 0), done.output
    assert done.stdout


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
