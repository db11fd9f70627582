"""Kernels launched the way tests want it: poisoned and guarded outputs, inputs that must stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import Choice, kernel_case
from dflash_graph.op import Op, dtype_of, spec_of
from dflash_graph.testing import Tolerance, assert_matches, poison_, same_bytes

Arguments = Mapping[str, Tensor | Sequence[Tensor]]

#: Bytes on either side of an output that a kernel must leave alone; a multiple of its alignment.
GUARD = 256


@dataclass
class Guarded:
    """A poisoned output between two guards."""

    memory: Tensor
    view: Tensor

    @staticmethod
    def make(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Guarded:
        size = torch.Size(shape).numel() * dtype.itemsize
        memory = torch.full((size + 2 * GUARD,), 0xA5, dtype=torch.uint8, device=device)
        view = memory[GUARD : GUARD + size].view(dtype).view(shape)
        poison_(view)
        return Guarded(memory, view)

    def assert_guards(self, what: str) -> None:
        both = torch.cat((self.memory[:GUARD], self.memory[-GUARD:]))
        assert bool((both == 0xA5).all()), f"{what}: written outside the output"


def _each(value: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (value,) if isinstance(value, Tensor) else value


def _map(arguments: Arguments, function: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {
        name: function(value) if isinstance(value, Tensor) else [function(v) for v in value]
        for name, value in arguments.items()
    }


def run_kernel(
    cache_dir: Path,
    op: Op,
    arguments: Arguments,
    attributes: Mapping[str, Any],
    *,
    choice: Choice | None = None,
    holes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Launch an op's kernel; checks that outputs are written whole, and nothing else is.

    Outputs and workspace are poisoned first, and guarded; state is updated in a copy.

    Args:
        choice: tiles and launch parameters instead of the default.
        holes: values that replace what geometry and choice give.

    Returns:
        Outputs and updated state by name.
    """
    arguments = _map(arguments, lambda v: v)
    for name in op.updated:
        arguments[name] = _map({name: arguments[name]}, torch.clone)[name]
    specs = {
        name: spec_of(value) if isinstance(value, Tensor) else tuple(map(spec_of, value))
        for name, value in arguments.items()
    }
    case = kernel_case(op.name, specs, attributes, choice=choice)
    assert case is not None, f"{op.name} has no kernel for {specs} {attributes}"
    case = replace(case, holes=tuple(sorted({**dict(case.holes), **(holes or {})}.items())))
    device = _each(next(iter(arguments.values())))[0].device
    snapshot = _map(arguments, torch.clone)
    unrounded = dict(case.holes).get("unrounded", False)
    outputs = {
        name: Guarded.make(
            spec.bind({}), torch.float32 if unrounded else dtype_of(spec.dtype), device
        )
        for name, spec in op.infer(specs, attributes).items()
    }
    tensors = {**arguments, **{name: output.view for name, output in outputs.items()}}
    module = case.module(cache_dir)
    extra = module.prepare(**tensors) if hasattr(module, "prepare") else {}
    if case.workspace:
        outputs["workspace"] = Guarded.make((case.workspace,), torch.uint8, device)
        extra = {**extra, "workspace": outputs["workspace"].view}
    module.launch(
        **tensors,
        **extra,
        **{name: attributes[name] for name in case.scalars},
        num_warps=case.num_warps,
        num_stages=case.num_stages,
    )
    for name, value in arguments.items():
        if name not in op.updated:
            for found, expected in zip(_each(value), _each(snapshot[name]), strict=True):
                assert same_bytes(found, expected), f"{op.name}.{name}: an input was changed"
    for name, output in outputs.items():
        output.assert_guards(f"{op.name}.{name}")
    outputs.pop("workspace", None)
    return {
        **{name: output.view for name, output in outputs.items()},
        **{name: arguments[name] for name in op.updated},
    }


def check_kernel(
    cache_dir: Path,
    op: Op,
    arguments: Arguments,
    attributes: Mapping[str, Any],
    tolerance: Tolerance,
    **changes: Any,
) -> dict[str, Any]:
    """`run_kernel`, and every output and updated state within `tolerance` of the float64
    reference.
    """
    found = run_kernel(cache_dir, op, arguments, attributes, **changes)
    wide = _map(arguments, lambda v: v.double() if v.is_floating_point() else v.clone())
    results = op.reference(**wide, **attributes)
    if results is None:
        results = ()
    results = results if isinstance(results, tuple) else (results,)
    oracle = {
        **dict(zip(op.outputs, results, strict=True)),
        **{name: wide[name] for name in op.updated},
    }
    for name, value in oracle.items():
        for left, right in zip(_each(found[name]), _each(value), strict=True):
            assert_matches(left, right, tolerance, f"{op.name}.{name}")
    return found


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """`run_kernel` with a cache of the test's own."""
    return partial(run_kernel, tmp_path)


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """`check_kernel` with a cache of the test's own."""
    return partial(check_kernel, tmp_path)
