"""Runs each `interpreted*.py` in a process of its own, where triton interprets kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(Path(__file__).parent.glob("interpreted*.py"))


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_in_the_interpreter(file: Path, rng: torch.Generator, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--seed", str(rng.initial_seed()), "--basetemp", str(tmp_path / "tests")),
        str(file),
    ]
    # Also pytest's and xdist's own variables stay behind: the inner run is a run of its own.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = kept | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"\d+ passed.*", summary), summary
