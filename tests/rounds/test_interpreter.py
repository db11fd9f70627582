"""Runs `interpreted_round.py` in a process of its own, where triton interprets kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_rounds_in_the_interpreter(interpret: Callable[[Path], None]) -> None:
    interpret(Path(__file__).with_name("interpreted_round.py"))
