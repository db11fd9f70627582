"""Kernels of small rounds under compute-sanitizer: no stray access, no race in shared memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


#: What a tool ends with when it has found nothing.
CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["dflash", "dflash2"])
@pytest.mark.parametrize("tool", CLEAN)
def test_kernels_are_clean(tool: str, draft: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    assert sanitizer is not None, "compute-sanitizer comes with the CUDA toolkit"
    script = str(Path(__file__).with_name("sanitized.py"))
    command = [sanitizer, "--tool", tool, sys.executable, "-P", script, draft]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert CLEAN[tool] in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
