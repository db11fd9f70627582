"""Named tolerances, poisoned buffers and the op check shared by tests, benchmarks and the tuner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dflash_graph.op import Op, dtype_of, spec_of
from dflash_graph.tensor import TensorSpec

#: Ids and counts are poisoned with a number that is no id, slot or count.
INTEGER_POISON: Final = -(2**31) + 7


@dataclass(frozen=True)
class Tolerance:
    """An elementwise bound `absolute + relative * |oracle|` and a bound on the relative L2
    error.
    """

    absolute: float
    relative: float
    l2: float


EXACT: Final = Tolerance(0.0, 0.0, 0.0)
#: One float32 rounding after an evaluation that is exact to far below it.
F32_ELEMENTWISE: Final = Tolerance(1e-6, 1e-6, 2e-7)
#: A float32 sum of a few thousand products.
F32_REDUCTION: Final = Tolerance(2e-5, 2e-5, 2e-6)
#: A float32 sum on tensor cores, which truncate at every step of 16 products instead of rounding:
#: the error drifts one way by up to 2^-24 a step (I / 16 * 2^-24 = 6.5e-5 for I = 17408).
TENSOR_CORE_REDUCTION: Final = Tolerance(2e-3, 1e-4, 1e-4)
#: One bfloat16 rounding (2^-8 relative, in L2 too where one value dominates).
BF16_ELEMENTWISE: Final = Tolerance(1e-6, 4e-3, 4e-3)
#: A bfloat16 result of a float32 sum, and inputs that were themselves rounded once.
BF16_REDUCTION: Final = Tolerance(2e-2, 1e-2, 5e-3)


def assert_matches(
    found: Tensor, oracle: Tensor, tolerance: Tolerance, what: str = "output"
) -> None:
    """Raise AssertionError unless `found` is finite and within `tolerance` of the float64
    `oracle`.
    """
    assert found.shape == oracle.shape, (
        f"{what}: shape {tuple(found.shape)}, oracle {tuple(oracle.shape)}"
    )
    if not found.is_floating_point():
        assert torch.equal(found, oracle.to(found.dtype)), f"{what}: {found} differs from {oracle}"
        return
    wide, oracle = found.double(), oracle.double()
    assert bool(torch.isfinite(wide).all()), (
        f"{what}: {int((~torch.isfinite(wide)).sum())} values not finite"
    )
    error = (wide - oracle).abs()
    over = error - (tolerance.absolute + tolerance.relative * oracle.abs())
    assert over.numel() == 0 or float(over.max()) <= 0.0, (
        f"{what}: worst error {float(error.max()):.3e} is {float(over.max()):.3e} over the bound"
    )
    norm = float(oracle.norm())
    if norm > 0.0:
        ratio = float(error.norm()) / norm
        assert ratio <= tolerance.l2 or float(error.max()) <= tolerance.absolute, (
            f"{what}: relative L2 error {ratio:.3e}, bound {tolerance.l2:.1e}"
        )


def poison_(buffer: Tensor) -> Tensor:
    """Fill with NaN, or with an impossible integer; returns the buffer."""
    if buffer.is_floating_point():
        return buffer.fill_(float("nan"))
    if buffer.dtype in (torch.uint8, torch.bool):
        return buffer.fill_(True if buffer.dtype is torch.bool else 0xFF)
    return buffer.fill_(INTEGER_POISON)


def poisoned(spec: TensorSpec, device: str = "cpu") -> Tensor:
    """A new poisoned tensor of a static spec."""
    return poison_(torch.empty(spec.bind({}), dtype=dtype_of(spec.dtype), device=device))


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaN payloads and the sign of zero included)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(
        left.contiguous().view(torch.uint8).reshape(-1),
        right.contiguous().view(torch.uint8).reshape(-1),
    )


def _map(arguments: Mapping[str, Any], function: Any) -> dict[str, Any]:
    return {
        name: function(value) if isinstance(value, Tensor) else [function(v) for v in value]
        for name, value in arguments.items()
    }


def check_op(
    op: Op,
    arguments: Mapping[str, Any],
    attributes: Mapping[str, Any],
    tolerance: Tolerance,
    *,
    opcheck: bool = True,
    oracle: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Run a registered op against its float64 reference and its own contract.

    Checks: outputs have the inferred specs and match the oracle within `tolerance`; updated state
        matches; every
    other argument keeps its bytes; `torch.library.opcheck` passes.

    Args:
        arguments: argument -> tensor (or list); left untouched.
        oracle: independent float64 results (outputs and updated state, by name) to compare with
            instead of the reference in float64.

    Returns:
        Outputs and updated state of the run in the given dtype, by name.
    """
    clones = _map(arguments, torch.clone)
    snapshot = _map(arguments, torch.clone)
    if oracle is None:
        wide = _map(arguments, lambda v: v.double() if v.is_floating_point() else v.clone())
        results = op.reference(**wide, **attributes)
        results = results if isinstance(results, tuple) else (results,)
        oracle = {
            **dict(zip(op.outputs, results, strict=False)),
            **{name: wide[name] for name in op.updated},
        }
    results = op(**clones, **attributes)
    results = results if isinstance(results, (tuple, list)) else (results,)
    found = dict(zip(op.outputs, results, strict=False))
    specs: dict[str, Any] = {
        name: spec_of(v) if isinstance(v, Tensor) else tuple(spec_of(t) for t in v)
        for name, v in arguments.items()
    }
    for name, spec in op.infer(specs, attributes).items():
        assert spec_of(found[name]) == spec, (
            f"{op.name}.{name}: {spec_of(found[name])}, inferred {spec}"
        )
    for name in op.updated:
        found[name] = clones[name]
    for name, value in found.items():
        assert_matches(value, oracle[name], tolerance, f"{op.name}.{name}")
    for name, value in clones.items():
        if name not in op.updated:
            pairs = (
                [(value, snapshot[name])]
                if isinstance(value, Tensor)
                else zip(value, snapshot[name], strict=True)
            )
            assert all(same_bytes(a, b) for a, b in pairs), (
                f"{op.name}.{name}: an input was changed"
            )
    if opcheck:
        ordered = tuple(_map(arguments, torch.clone).values())
        values = tuple(attributes[name] for name in op.attributes)
        torch.library.opcheck(
            getattr(torch.ops.dflash_graph, op.name).default,
            (*ordered, *values),
        )
    return found


def assert_row_invariant(
    op: Op, arguments: Mapping[str, Any], attributes: Mapping[str, Any], columns: Sequence[str]
) -> None:
    """Raise AssertionError unless each column of an op has the same bits in every company.

    Compared with the whole block: every column as a call of its own, the rows in reverse order, and
    a block cut to its first columns.

    Args:
        columns: the arguments with leading axes `[B, W]`, W > 1; every call shares the others.
    """

    def run(cut: Any) -> tuple[Tensor, ...]:
        chosen = {name: cut(v).clone() if name in columns else v for name, v in arguments.items()}
        results = op.reference(**chosen, **attributes)
        return results if isinstance(results, tuple) else (results,)

    def compare(cut: Any, what: str) -> None:
        for name, found, expected in zip(op.outputs, run(cut), whole, strict=True):
            assert same_bytes(found, cut(expected)), f"{op.name}.{name}: other bits for {what}"

    whole = run(lambda v: v)
    batch, width = arguments[columns[0]].shape[:2]
    for b in range(batch):
        for i in range(width):
            compare(lambda v, b=b, i=i: v[b : b + 1, i : i + 1], f"row {b}, column {i} alone")
    compare(lambda v: v.flip(0), "the rows in reverse")
    compare(lambda v: v[:, : width // 2 + 1], "a shorter block")


def assert_traceable(op: Op, arguments: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
    """Raise AssertionError unless the reference traces as one graph that gives the same bits."""

    def call(tensors: dict[str, Any]) -> Any:
        return op.reference(**tensors, **attributes)

    torch.compiler.reset()  # all ops share the one `call`, and a function's traces are few
    traced = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager")
    found, expected = traced(dict(arguments)), call(dict(arguments))
    if isinstance(expected, Tensor):
        found, expected = (found,), (expected,)
    for name, left, right in zip(op.outputs, found, expected, strict=True):
        assert same_bytes(left, right), f"{op.name}.{name}: the traced reference differs"
