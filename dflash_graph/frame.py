"""frame: one flat int32 buffer that carries every input of a segment, and one that carries its
results.

Page tables, slots, frontiers and lengths are data here, never a reason for another graph. One
buffer means one host-to-device copy in and one out, at addresses that do not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dflash_graph.errors import ShapeError
from dflash_graph.graph import Graph, Value
from dflash_graph.op import dtype_of
from dflash_graph.tensor import ITEM_BYTES

_View = TypeVar("_View")
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
    """A buffer with named fields: one side that the host fills and reads, one that segments see.

    On the CPU both are the same memory. On a device the host's side is pinned, and a whole frame
    crosses in one copy: `upload` before a segment, `download` after it.

    Args:
        fields: layout of the buffer.
        device: where segments run.
    """

    def __init__(self, fields: FrameLayout, device: str | torch.device = "cpu") -> None:
        self.layout = fields
        self.buffer = torch.zeros(fields.words, dtype=torch.int32, device=device)
        self._attach()

    def _attach(self) -> None:
        self.host = self.buffer
        if self.buffer.is_cuda:
            self.host = torch.zeros(self.layout.words, dtype=torch.int32, pin_memory=True)
        self._words = self.host.numpy()
        self._views = self._cut(self.host)
        self._arrays = {name: view.numpy() for name, view in self._views.items()}
        self._bound = self._cut(self.buffer)

    def _cut(self, buffer: Tensor) -> dict[str, Tensor]:
        views = {}
        for name, (offset, shape, dtype) in self.layout.fields.items():
            words = buffer[offset : offset + prod(shape)]
            views[name] = words.view(dtype_of(dtype)).view(shape)
        return views

    def twin(self) -> Frame:
        """A frame with a host side of its own over the same buffer, so that the host can fill one
        while the copy of the other is under way; this frame itself on the CPU.
        """
        if self.host is self.buffer:
            return self
        made = Frame.__new__(Frame)
        made.layout, made.buffer = self.layout, self.buffer
        made._attach()
        return made

    def __getitem__(self, name: str) -> Tensor:
        """A field on the host's side."""
        return self._field(self._views, name)

    def bound(self, name: str) -> Tensor:
        """A field as segments see it."""
        return self._field(self._bound, name)

    def __contains__(self, name: str) -> bool:
        return name in self._views

    @staticmethod
    def _field(views: Mapping[str, _View], name: str) -> _View:
        try:
            return views[name]
        except KeyError:
            raise ShapeError(f"frame has no field {name!r}; it has {sorted(views)}") from None

    def fill(self, **fields: Any) -> None:
        """Set fields from nested lists, tensors or one number; shapes must agree.

        Raises:
            ShapeError: a field does not exist, has another shape, or is of integers and given
                others; what was set before it is set.
        """
        for name, given in fields.items():
            array = self._field(self._arrays, name)
            try:
                found = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
            except (TypeError, ValueError) as error:
                raise ShapeError(f"frame.{name}: expected numbers, got {error}") from None
            # Looked at by their kind alone: a round fills a dozen fields, and ranges cost time.
            if found.dtype.kind not in ("iub" if array.dtype.kind == "i" else "iubf"):
                raise ShapeError(f"frame.{name}: expected {array.dtype}, got {found.dtype}")
            if found.shape and found.shape != array.shape:
                raise ShapeError(
                    f"frame.{name}: expected shape {list(array.shape)}, got {list(found.shape)}"
                )
            array[...] = found

    def read(self, name: str) -> Any:
        """A field on the host's side as nested lists."""
        return self._field(self._arrays, name).tolist()

    def take(self, other: Frame) -> None:
        """Set every field to what the host's side of a frame of this layout holds."""
        self._words[...] = other._words

    def clear(self) -> None:
        """Zero every field."""
        self.host.zero_()

    def upload(self) -> None:
        """Queue the copy from the host's side."""
        if self.host is not self.buffer:
            self.buffer.copy_(self.host, non_blocking=True)

    def download(self) -> None:
        """Queue the copy to the host's side; it is there once the stream has come so far."""
        if self.host is not self.buffer:
            self.host.copy_(self.buffer, non_blocking=True)


def input_layout(graphs: Sequence[Graph], capacities: Mapping[str, int]) -> FrameLayout:
    """One input frame for several segments: fields of the same name are one field."""
    return layout([value for graph in graphs for value in graph.by_role("input")], capacities)


def output_layout(graphs: Sequence[Graph], capacities: Mapping[str, int]) -> FrameLayout:
    """One result frame for several segments."""
    return layout([value for graph in graphs for value in graph.by_role("output")], capacities)
