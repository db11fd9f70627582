"""Kernels launched the way tests want it: poisoned and guarded outputs, inputs that must stay."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.kernels import Choice, KernelCase, kernel_case
from dflash_graph.op import Op, dtype_of, spec_of
from dflash_graph.testing import Tolerance, assert_matches, poison_, same_bytes

#: Bytes on either side of an output that a kernel must leave alone; a multiple of its alignment.
GUARD = 256


@pytest.fixture
def needs_triton() -> None:
    """The test extra brings triton where it can be had; there, its absence is a failure."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        if sys.platform == "linux" and platform.machine() == "x86_64":
            raise
        pytest.skip("the test extra brings no triton on this platform")


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


def run_kernel(
    cache_dir: Path,
    op: Op,
    arguments: Mapping[str, Tensor],
    attributes: Mapping[str, Any],
    *,
    choice: Choice | None = None,
    holes: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Launch an op's kernel; checks that outputs are written whole, and nothing else is.

    Args:
        choice: tiles and launch parameters instead of the default.
        holes: values that replace what geometry and choice give.

    Returns:
        Outputs by name.
    """
    specs = {name: spec_of(value) for name, value in arguments.items()}
    case = kernel_case(op.name, specs, attributes, choice=choice)
    assert case is not None, f"{op.name} has no kernel for {specs} {attributes}"
    changed = tuple(sorted({**dict(case.holes), **(holes or {})}.items()))
    case = KernelCase(
        case.op, case.template, changed, case.num_warps, case.num_stages, case.scalars
    )
    device = next(iter(arguments.values())).device
    snapshot = {name: value.clone() for name, value in arguments.items()}
    unrounded = dict(changed).get("unrounded", False)
    outputs = {
        name: Guarded.make(
            spec.bind({}), torch.float32 if unrounded else dtype_of(spec.dtype), device
        )
        for name, spec in op.infer(specs, attributes).items()
    }
    case.module(cache_dir).launch(
        **arguments,
        **{name: output.view for name, output in outputs.items()},
        **{name: attributes[name] for name in case.scalars},
        num_warps=case.num_warps,
        num_stages=case.num_stages,
    )
    for name, value in arguments.items():
        assert same_bytes(value, snapshot[name]), f"{op.name}.{name}: an input was changed"
    for name, output in outputs.items():
        output.assert_guards(f"{op.name}.{name}")
    return {name: output.view for name, output in outputs.items()}


def check_kernel(
    cache_dir: Path,
    op: Op,
    arguments: Mapping[str, Tensor],
    attributes: Mapping[str, Any],
    tolerance: Tolerance,
    **changes: Any,
) -> dict[str, Tensor]:
    """`run_kernel`, and every output within `tolerance` of the float64 reference."""
    found = run_kernel(cache_dir, op, arguments, attributes, **changes)
    wide = {
        name: value.double() if value.is_floating_point() else value
        for name, value in arguments.items()
    }
    results = op.reference(**wide, **attributes)
    results = results if isinstance(results, tuple) else (results,)
    for name, oracle in zip(op.outputs, results, strict=True):
        assert_matches(found[name], oracle, tolerance, f"{op.name}.{name}")
    return found


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """`run_kernel` with a cache of the test's own."""
    return partial(run_kernel, tmp_path)


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """`check_kernel` with a cache of the test's own."""
    return partial(check_kernel, tmp_path)
