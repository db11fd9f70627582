"""Tensor contracts: dtypes, shape expressions, specs and symbol binding.

A shape expression is text such as ``"B W H"`` or ``"B W 2*G"``: axes separated by blanks, each an
integer, a symbol, or products, sums and differences of them. The first tensor that shows a lone
symbol binds it; every later axis must agree, and the error names both places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from dflash_graph.errors import ShapeError

#: Bytes of one element, by dtype name (torch's names).
ITEM_BYTES: Final[Mapping[str, int]] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}

#: In a contract, the dtype of activations and matrices: float32 or bfloat16 by engine option.
MODEL_DTYPE: Final = "model"

#: An axis is an int, or the name of a capacity that is bound only when state is allocated.
Dim = int | str

_ATOM = r"(?:\d+|[A-Za-z_][A-Za-z_0-9]*)"
_TOKEN = re.compile(rf"{_ATOM}|[*+-]")
_EXPRESSION = re.compile(rf"{_ATOM}(?:[*+-]{_ATOM})*")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one value.

    Args:
        shape: axes; an ``int``, or for state the name of a capacity (``"slots"``, ``"pages"``) that
            is no part of a graph's identity and is bound when the pools are made.
        dtype: a torch dtype name, e.g. ``"float32"``.
    """

    shape: tuple[Dim, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ShapeError(f"dtype: expected one of {sorted(ITEM_BYTES)}, got {self.dtype!r}")

    @property
    def is_static(self) -> bool:
        return all(isinstance(axis, int) for axis in self.shape)

    def bind(self, capacities: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with every capacity replaced by its number; raises ShapeError for an unknown
        one.
        """
        try:
            return tuple(capacities[axis] if isinstance(axis, str) else axis for axis in self.shape)
        except KeyError as error:
            raise ShapeError(
                f"capacity {error} is not bound; known: {sorted(capacities)}"
            ) from None

    def numel(self, capacities: Mapping[str, int] | None = None) -> int:
        """Number of elements."""
        total = 1
        for axis in self.bind(capacities or {}):
            total *= axis
        return total

    def nbytes(self, capacities: Mapping[str, int] | None = None) -> int:
        """Size in bytes, without alignment."""
        return self.numel(capacities) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(axis) for axis in self.shape)}]"


@dataclass(frozen=True)
class WeightUse:
    """How one weight value of a graph is made from tensors of a checkpoint.

    Args:
        parts: logical tensor names, ``"target/layers.0.mlp.gate_proj.weight"``; several are stacked
            along axis 0. Two uses may share storage: a use whose parts are a contiguous run of
            another's is a view of it.
        spec: shape and dtype the graph reads.
    """

    parts: tuple[str, ...]
    spec: TensorSpec


class Symbols:
    """Bindings of one op call: symbol -> (size, where it was first seen)."""

    def __init__(self, where: str, known: Mapping[str, int] | None = None) -> None:
        self._where = where
        self._bound: dict[str, tuple[Dim, str]] = {
            name: (size, f"attribute {name}") for name, size in (known or {}).items()
        }

    def bind(self, argument: str, expression: str, shape: tuple[Dim, ...]) -> None:
        """Match `shape` against `expression`, binding symbols seen for the first time."""
        axes = expression.split()
        if len(axes) != len(shape):
            raise ShapeError(
                f"{self._where}.{argument}: expected {len(axes)} axes [{expression}], "
                f"got {len(shape)}: {list(shape)}"
            )
        for index, (axis, size) in enumerate(zip(axes, shape, strict=True)):
            place = f"axis {index} of {argument}"
            if axis.isidentifier() and axis not in self._bound:
                self._bound[axis] = (size, place)
                continue
            expected = self.evaluate(axis)
            if expected != size:
                origin = (
                    f" ({axis} from {self._bound[axis][1]})"
                    if axis in self._bound
                    else f" ({axis})"
                )
                raise ShapeError(
                    f"{self._where}.{argument}: {place} must be {expected}{origin}, got {size}"
                )

    def evaluate(self, axis: str) -> Dim:
        """Value of one axis expression; `*` binds tighter than `+` and `-`."""
        tokens = _tokens(axis)
        if len(tokens) == 1 and tokens[0].isidentifier():
            return self._value(tokens[0])
        total, sign, product = 0, 1, 1
        for token in (*tokens, "+"):
            if token in "+-":
                total += sign * product
                sign, product = (1 if token == "+" else -1), 1
            elif token != "*":
                value = self._value(token)
                if isinstance(value, str):
                    raise ShapeError(
                        f"{self._where}: capacity {value!r} cannot stand in arithmetic ({axis!r})"
                    )
                product *= value
        return total

    def shape(self, expression: str) -> tuple[Dim, ...]:
        """The shape that `expression` denotes under these bindings."""
        return tuple(self.evaluate(axis) for axis in expression.split())

    def sizes(self) -> dict[str, Dim]:
        """All bindings, symbol -> size."""
        return {name: size for name, (size, _) in self._bound.items()}

    def _value(self, token: str) -> Dim:
        if token.isdigit():
            return int(token)
        if token not in self._bound:
            raise ShapeError(
                f"{self._where}: symbol {token!r} is bound by no input; "
                f"bound: {sorted(self._bound)}"
            )
        return self._bound[token][0]


@lru_cache(maxsize=4096)
def _tokens(axis: str) -> tuple[str, ...]:
    if _EXPRESSION.fullmatch(axis) is None:
        raise ShapeError(f"malformed shape expression {axis!r}")
    return tuple(_TOKEN.findall(axis))
