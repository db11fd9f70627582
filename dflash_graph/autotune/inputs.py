"""Inputs: arguments of any tuned op, of plausible values, for requests with some context.

Requests own slots and pages in order, so that the first requests of a call own the first part of
every pool: a call can be cut to some of them without new state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_graph.autotune.tasks import Call
from dflash_graph.op import Argument, Specs, dtype_of, spec_of
from dflash_graph.ops import get_op
from dflash_graph.state import Capacities
from dflash_graph.tensor import TensorSpec

Arguments = dict[str, Tensor | list[Tensor]]

_STARTS = ("start", "frontier")
_COUNTS = ("live", "committed")


class Inputs:
    """Makes the arguments of calls on one device.

    Args:
        device: torch's name.
        context: tokens before the block of every request.
        seed: of all values.
    """

    def __init__(self, device: str, context: int, seed: int = 0) -> None:
        self.device = device
        self.context = context
        self._generator = torch.Generator(device).manual_seed(seed)

    def make(self, call: Call, weights: dict[Any, Tensor]) -> Arguments:
        """New arguments of a call.

        Args:
            weights: weights that exist; new ones are added, and calls of one shape share them.
        """
        op, batch, columns = get_op(call.op), call.sizes.get("B", 1), call.sizes.get("W", 1)
        capacities = Capacities(batch, self.context + columns).bindings()
        made: Arguments = {}
        for name, argument in op.inputs.items():
            given = call.specs[name]
            specs = (given,) if isinstance(given, TensorSpec) else given
            values = []
            for index, spec in enumerate(specs):
                if argument.kind == "weight":
                    key = (name, index, str(spec))
                    if key not in weights:
                        weights[key] = self._values(name, argument, spec, capacities, columns)
                    values.append(weights[key])
                else:
                    values.append(self._values(name, argument, spec, capacities, columns))
            made[name] = values if argument.many else values[0]
        return made

    def _values(
        self,
        name: str,
        argument: Argument,
        spec: TensorSpec,
        capacities: Mapping[str, int],
        columns: int,
    ) -> Tensor:
        shape, dtype = spec.bind(capacities), dtype_of(spec.dtype)
        if not dtype.is_floating_point:
            return self._integers(name, shape, columns).to(self.device)
        values = torch.empty(shape, dtype=dtype, device=self.device)
        values.normal_(0.0, 1.0, generator=self._generator)
        if argument.kind == "weight" and len(shape) == 2:
            return values.mul_(shape[-1] ** -0.5)
        if name in ("cos", "sin"):
            # Not of one angle: no kernel looks.
            return values.cos_() if name == "cos" else values.sin_()
        if name == "beta":
            return values.sigmoid_()
        if name == "g":
            return values.abs_().mul_(-0.1)
        if name == "squares":  # of the 64 channels of a segment
            return values.abs_().add_(0.5).mul_(64.0)
        return values

    def _integers(self, name: str, shape: Sequence[int], columns: int) -> Tensor:
        if name == "slots":
            return torch.arange(shape[0], dtype=torch.int32)
        if name == "page_table":
            pages = shape[0] * shape[1]
            return torch.arange(pages, dtype=torch.int32).reshape(*shape)
        if name in _STARTS:
            return torch.full(tuple(shape), self.context, dtype=torch.int32)
        if name in _COUNTS:
            return torch.full(tuple(shape), columns, dtype=torch.int32)
        raise AssertionError(f"no values are known for the integers {name!r}")


def specs_of(arguments: Arguments) -> dict[str, Specs]:
    """Argument -> spec."""
    return {
        name: spec_of(value) if isinstance(value, Tensor) else tuple(map(spec_of, value))
        for name, value in arguments.items()
    }


def each(value: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors of one argument."""
    return (value,) if isinstance(value, Tensor) else value


def mapped(arguments: Arguments, function: Callable[[Tensor], Tensor]) -> Arguments:
    """The same arguments with every tensor changed."""
    return {
        name: function(value) if isinstance(value, Tensor) else [function(v) for v in value]
        for name, value in arguments.items()
    }


def cut_batch(call: Call, arguments: Arguments, batch: int) -> Arguments:
    """The call of the first requests; state is shared."""
    op = get_op(call.op)
    return {
        name: _cut(value, lambda v: v[:batch]) if op.inputs[name].shape.startswith("B ")
        or op.inputs[name].shape == "B" else value
        for name, value in arguments.items()
    }  # fmt: skip


def cut_columns(call: Call, arguments: Arguments, columns: int) -> Arguments:
    """The call of every request's first columns; all of them are live."""
    op, made = get_op(call.op), dict(arguments)
    for name, value in arguments.items():
        if op.inputs[name].shape.startswith("B W"):
            made[name] = _cut(value, lambda v: v[:, :columns])
        elif name in _COUNTS and isinstance(value, Tensor):
            made[name] = value.clamp(max=columns)
    return made


def _cut(value: Tensor | list[Tensor], cut: Callable[[Tensor], Tensor]) -> Tensor | list[Tensor]:
    if isinstance(value, Tensor):
        return cut(value).contiguous()
    return [cut(v).contiguous() for v in value]
