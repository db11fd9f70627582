"""Typed reading of JSON config files: errors name the file, the key and what stood there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from dflash_graph.errors import ConfigError, UnsupportedModelError

_INT_MAX: Final = 2**31 - 1
_DTYPES: Final = ("bfloat16", "float16", "float32")

_T = TypeVar("_T")


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file; raises ConfigError for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path}: expected a readable config file, got {error.strerror}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected JSON, got broken text: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """A value as an error shows it."""
    return "nothing" if value is None else json.dumps(value, default=repr)[:200]


class Fields:
    """Typed access to JSON objects: scopes are asked in order, and null counts as missing.

    A scope is a label that stands before its keys in errors, and an object.
    """

    def __init__(self, where: str, scopes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self._where = where
        self._scopes = scopes

    def get(self, key: str) -> Any:
        return self._find(key)[1]

    def fail(self, key: str, expected: str, found: str | None = None) -> NoReturn:
        label, value = self._find(key)
        got = found or shown(value)
        raise ConfigError(f"{self._where}: {label}{key}: expected {expected}, got {got}")

    def only(self, key: str, *supported: object) -> None:
        """Raise UnsupportedModelError if `key` is stated and is none of the `supported` values."""
        label, value = self._find(key)
        # Strict about kinds, since True == 1 in Python.
        if value is not None and not any(
            value == known and isinstance(value, bool) == isinstance(known, bool)
            for known in supported
        ):
            expected = " or ".join(shown(known) for known in supported)
            raise UnsupportedModelError(
                f"{self._where}: {label}{key}: expected {expected} (all that is supported), "
                f"got {shown(value)}"
            )

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return value

    def integer(
        self, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = _INT_MAX
    ) -> int:
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            self.fail(key, f"an integer {minimum}..{maximum}")
        return value

    def integers(self, key: str, *, distinct: bool = True) -> tuple[int, ...]:
        value = self.get(key)
        kind = "a list of different integers >= 0" if distinct else "a list of integers >= 0"
        if not isinstance(value, list) or not value:
            self.fail(key, kind)
        if any(type(item) is not int or not 0 <= item <= _INT_MAX for item in value):
            self.fail(key, kind)
        if distinct and len(set(value)) != len(value):
            self.fail(key, kind, f"{value} with repeated ids")
        return tuple(value)

    def multiple(self, many: str, few: str) -> tuple[int, int]:
        """Two head counts, of which the first must be a multiple of the second."""
        whole, part = self.integer(many), self.integer(few)
        if whole % part:
            self.fail(many, f"a multiple of {part} ({few})")
        return whole, part

    def number(self, key: str, *, default: float | None = None, positive: bool = False) -> float:
        value = self._value(key, default)
        kind = "a finite number > 0" if positive else "a finite number"
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(key, kind)
        # Comparing, not converting: JSON allows integers that no float can hold.
        if not abs(value) <= sys.float_info.max or (positive and value <= 0):
            self.fail(key, kind)
        return float(value)

    def positive(self, key: str) -> float:
        return self.number(key, positive=True)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def optional(self, key: str, read: Callable[[str], _T]) -> _T | None:
        return None if self.get(key) is None else read(key)

    def dtype(self) -> str | None:
        for key in ("dtype", "torch_dtype"):
            self.only(key, *_DTYPES)
            if self.get(key) is not None:
                return str(self.get(key))
        return None

    def architecture(self, known: Mapping[str, object]) -> str:
        """The only entry of `architectures`, which must be a known one."""
        value = self.get("architectures")
        if not isinstance(value, list) or len(value) != 1 or value[0] not in list(known):
            raise UnsupportedModelError(
                f"{self._where}: architectures: expected a list of one of {', '.join(known)}, "
                f"got {shown(value)}"
            )
        return str(value[0])

    def model_type(self, expected: str, architecture: str) -> None:
        label, value = self._find("model_type")
        if value != expected:
            raise UnsupportedModelError(
                f"{self._where}: {label}model_type: expected {expected!r} "
                f"(architecture {architecture}), got {shown(value)}"
            )

    def layer_types(self, kinds: Sequence[str], layers: int) -> tuple[str, ...] | None:
        """The stated kind of every layer, or None where the key is missing."""
        value = self.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers:
            found = f"{len(value)} entries" if isinstance(value, list) else None
            self.fail("layer_types", f"a list of {layers} kinds (num_hidden_layers)", found)
        for index, kind in enumerate(value):
            if kind not in kinds:
                self.fail(
                    "layer_types", f"kinds among {list(kinds)}", f"{shown(kind)} at index {index}"
                )
        return tuple(value)

    def rope(self) -> tuple[float, Fields]:
        """Base and parameters of rotary embedding, from `rope_parameters` or the older keys.

        Returns:
            theta, and the fields of `rope_parameters`, then `rope_scaling`, then the top level.
        """
        sections = []
        for key in ("rope_parameters", "rope_scaling"):
            section = (f"{self._find(key)[0]}{key}.", self.section(key))
            for kind in ("rope_type", "type"):
                Fields(self._where, [section]).only(kind, "default")
            sections.append(section)
        fields = Fields(self._where, [*sections, *self._scopes])
        return fields.positive("rope_theta"), fields

    def _find(self, key: str) -> tuple[str, Any]:
        for label, scope in self._scopes:
            if scope.get(key) is not None:
                return label, scope[key]
        return self._scopes[0][0] if len(self._scopes) == 1 else "", None

    def _value(self, key: str, default: object) -> Any:
        value = self.get(key)
        return default if value is None else value
