"""Runs each `interpreted*.py` in a process of its own, where triton interprets kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("interpreted*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_in_the_interpreter(file: Path, interpret: Callable[[Path], None]) -> None:
    interpret(file)
