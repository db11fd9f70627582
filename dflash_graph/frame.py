"""frame: one flat int32 buffer that carries every input of a segment, and one that carries its
results.

Page tables, slots, frontiers and lengths are data here, never a reason for another graph. One
buffer means one host-to-device copy in and one out, at addresses that do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.graph import Graph, Value
from dflash_graph.op import dtype_of
from dflash_graph.tensor import ITEM_BYTES

#: Fields start at multiples of this many int32 words (64 bytes).
_FIELD_WORDS = 16


@dataclass(frozen=True)
class FrameLayout:
    """Where each field lies, as (offset in int32 words, shape, dtype), by value name."""

    fields: Mapping[str, tuple[int, tuple[int, ...], str]]
    words: int

    @property
    def nbytes(self) -> int:
        return self.words * ITEM_BYTES["int32"]


def layout(values: Sequence[Value], capacities: Mapping[str, int]) -> FrameLayout:
    """Lay out values (all of four-byte dtypes) one after another."""
    fields: dict[str, tuple[int, tuple[int, ...], str]] = {}
    cursor = 0
    for value in values:
        assert ITEM_BYTES[value.spec.dtype] == 4, f"{value.name}: frames carry four-byte dtypes"
        if value.name in fields:
            continue
        shape = value.spec.bind(capacities)
        fields[value.name] = (cursor, shape, value.spec.dtype)
        cursor += -(-value.spec.numel(capacities) // _FIELD_WORDS) * _FIELD_WORDS
    return FrameLayout(fields, max(cursor, _FIELD_WORDS))


class Frame:
    """A buffer with named views.

    Args:
        fields: layout of the buffer.
        device: where it lives.
    """

    def __init__(self, fields: FrameLayout, device: str | torch.device = "cpu") -> None:
        self.layout = fields
        self.buffer = torch.zeros(fields.words, dtype=torch.int32, device=device)
        self._views: dict[str, Tensor] = {}
        for name, (offset, shape, dtype) in fields.fields.items():
            count = 1
            for axis in shape:
                count *= axis
            words = self.buffer[offset : offset + count]
            self._views[name] = words.view(dtype_of(dtype)).view(shape)

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._views[name]
        except KeyError:
            raise ShapeError(f"frame has no field {name!r}; it has {sorted(self._views)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._views

    def fill(self, **fields: Any) -> None:
        """Set fields from nested lists, tensors or one number; shapes must agree.

        Raises:
            ShapeError: a field does not exist or has another shape.
        """
        for name, given in fields.items():
            view = self[name]
            value = given if isinstance(given, Tensor) else torch.tensor(given, dtype=view.dtype)
            if value.dim() and value.shape != view.shape:
                raise ShapeError(
                    f"frame.{name}: expected shape {list(view.shape)}, got {list(value.shape)}"
                )
            view.copy_(value)


def input_layout(graphs: Sequence[Graph], capacities: Mapping[str, int]) -> FrameLayout:
    """One input frame for several segments: fields of the same name are one field."""
    return layout([value for graph in graphs for value in graph.by_role("input")], capacities)


def output_layout(graphs: Sequence[Graph], capacities: Mapping[str, int]) -> FrameLayout:
    """One result frame for several segments."""
    return layout([value for graph in graphs for value in graph.by_role("output")], capacities)
