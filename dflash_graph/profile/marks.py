"""marks: what the pictures of the HTML page are made of.

Positions and extents are percent of the picture, so that a picture grows with the page and its text
does not. `style` is a class of the page's style sheet. The page's template draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """A rectangle; `y` counts from the top."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str


@dataclass(frozen=True)
class Dot:
    """A circle with a radius in pixels."""

    x: float
    y: float
    radius: float
    style: str
    title: str


@dataclass(frozen=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    style: str


@dataclass(frozen=True)
class Tick:
    """A label at an axis, and the grid line that it stands for."""

    at: float
    text: str


def nice_steps(end: float, count: int = 4) -> list[float]:
    """About `count` round numbers from 0 to `end`."""
    if end <= 0:
        return [0.0]
    raw = end / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if raw <= unit * factor * 1.0001)
    return [step * index for index in range(math.floor(end / step + 1e-9) + 1)]


def count_text(number: int, noun: str) -> str:
    """`"1 node"`, `"2 nodes"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
