"""Launching: one candidate's kernels bound to tensors, and whether what they compute is right.

Right is: within a bound of the float64 reference; the same bits again; and the same bits for every
row when the call is cut to fewer requests or columns, as it is in rounds of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from dflash_graph.autotune.inputs import (
    Arguments,
    cut_batch,
    cut_columns,
    each,
    mapped,
    specs_of,
)
from dflash_graph.autotune.spaces import Candidate, Space
from dflash_graph.autotune.tasks import Call
from dflash_graph.kernels import kernel_case, row_bucket, row_tile
from dflash_graph.op import Sizes, dtype_of
from dflash_graph.ops import get_op
from dflash_graph.testing import Tolerance, assert_matches, poison_, same_bytes

#: Bounds for a whole op against float64, in which nothing between its parts is rounded: what these
#: let through is rounding, what they stop is a wrong kernel.
TOLERANCES: Final[Mapping[str, Tolerance]] = {
    "bfloat16": Tolerance(1e-1, 3e-2, 2e-2),
    "float32": Tolerance(1e-3, 1e-3, 1e-4),
}

Results = dict[str, Tensor | list[Tensor]]


class Bound:
    """A candidate's launch over given arguments, with outputs of its own.

    What a launch reads or writes lives as long as this does.
    """

    def __init__(self, call: Call, candidate: Candidate, arguments: Arguments) -> None:
        op = get_op(call.op)
        self.arguments = arguments
        specs = specs_of(arguments)
        symbols, _ = op.bind(specs, call.attributes, model_dtype=call.dtype)
        sizes = Sizes({**call.attributes, **symbols.sizes()})
        known = dict(candidate.num_stages)
        rows = row_tile(call.op, sizes)
        rows = min(known, key=lambda other: abs(other - rows))
        case = kernel_case(
            call.op,
            specs,
            call.attributes,
            choice=candidate.choice(rows),
            model_dtype=call.dtype,
        )
        assert case is not None, f"{call.op} has no kernel for this call"
        device = each(next(iter(arguments.values())))[0].device
        inferred = op.infer(specs, call.attributes, model_dtype=call.dtype)
        self.outputs: dict[str, Tensor] = {
            name: poison_(torch.empty(spec.bind({}), dtype=dtype_of(spec.dtype), device=device))
            for name, spec in inferred.items()
        }
        bound: dict[str, Any] = {**arguments, **self.outputs}
        module = case.module()
        if hasattr(module, "prepare"):
            bound.update(module.prepare(**bound))
        bound.update({name: call.attributes[name] for name in case.scalars})
        if case.workspace:
            bound["workspace"] = poison_(
                torch.empty(case.workspace, dtype=torch.uint8, device=device)
            )
        bound.update(num_warps=case.num_warps, num_stages=case.num_stages)
        self._bound = bound
        self._launch: Callable[..., None] = module.launch

    def run(self) -> None:
        self._launch(**self._bound)


def compute(call: Call, candidate: Candidate, arguments: Arguments) -> Results:
    """Outputs and updated state of one launch, which updates a copy."""
    op = get_op(call.op)
    own = {
        name: mapped({name: value}, torch.clone)[name] if name in op.updated else value
        for name, value in arguments.items()
    }
    bound = Bound(call, candidate, own)
    bound.run()
    return {**bound.outputs, **{name: own[name] for name in op.updated}}


def oracle(call: Call, arguments: Arguments) -> Results:
    """The same from the reference in float64: where the arguments are, or on the host where they
    do not fit there that wide.
    """
    op = get_op(call.op)
    wide = sum(
        8 * v.numel() for value in arguments.values() for v in each(value) if v.is_floating_point()
    )
    device = each(next(iter(arguments.values())))[0].device
    place = device
    if device.type == "cuda" and 2 * wide > torch.cuda.mem_get_info(device)[0]:
        place = torch.device("cpu")

    def widened(v: Tensor) -> Tensor:
        v = v.to(place, copy=True)
        return v.double() if v.is_floating_point() else v

    values = mapped(arguments, widened)
    results = op.reference(**values, **call.attributes)
    if results is None:
        results = ()
    results = results if isinstance(results, tuple) else (results,)
    found: Results = dict(zip(op.outputs, results, strict=True))
    found.update({name: values[name] for name in op.updated})
    # Kept in float32: of the same size as what it is compared with, and far finer.
    return mapped(found, lambda v: (v.float() if v.is_floating_point() else v).to(device))


def check(
    call: Call, space: Space, candidate: Candidate, arguments: Arguments, expected: Results
) -> str:
    """What is wrong with a candidate's results; empty where nothing is."""
    found = compute(call, candidate, arguments)
    wrong = _against(call, arguments, found, expected)
    if wrong:
        return wrong
    again = compute(call, candidate, arguments)
    for name, left, right in _pairs(found, again):
        if not same_bytes(left, right):
            return f"{call.op}.{name}: other bits in a second run"
    for what, cut, kept in _cuts(call, space, arguments):
        part = compute(call, candidate, cut)
        for name, left, right in _pairs(part, {n: kept(n, v) for n, v in found.items()}):
            if name in get_op(call.op).updated:
                left = left[: right.shape[0]]
            if not same_bytes(left, right):
                return f"{call.op}.{name}: other bits with {what}"
    return ""


def _cuts(
    call: Call, space: Space, arguments: Arguments
) -> Iterator[tuple[str, Arguments, Callable[[str, Any], Any]]]:
    """Smaller calls of every row tile, and the part of the whole's results that each gives."""
    op, batch, columns = get_op(call.op), call.sizes.get("B", 1), call.sizes.get("W", 1)
    smaller = {row_bucket(b * columns): b for b in range(1, batch)}
    for b in sorted({1, *smaller.values()} - {batch}):

        def first(name: str, value: Any, b: int = b) -> Any:
            count = (lambda v: v.shape[0] * b // batch) if name in op.updated else (lambda v: b)
            return _cut_results(value, lambda v: v[: count(v)])

        yield f"{b} of {batch} requests", cut_batch(call, arguments, b), first
    if space.prefix and not op.updated:
        for width in sorted({1, (columns + 1) // 2} - {columns}):

            def start(name: str, value: Any, width: int = width) -> Any:
                return _cut_results(value, lambda v: v[:, :width])

            yield f"{width} of {columns} columns", cut_columns(call, arguments, width), start


def _cut_results(value: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    return cut(value) if isinstance(value, Tensor) else [cut(v) for v in value]


def _pairs(left: Results, right: Results) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name, value in left.items():
        for a, b in zip(each(value), each(right[name]), strict=True):
            yield name, a, b


def _against(call: Call, arguments: Arguments, found: Results, expected: Results) -> str:
    tolerance = TOLERANCES[call.dtype]
    for name, left, right in _pairs(found, expected):
        if name == "ids" and "scores" in found:
            continue  # below: equal but for scores that are equal to within the bound
        try:
            assert_matches(left, right, tolerance, f"{call.op}.{name}")
        except AssertionError as error:
            return str(error)
    if "ids" in found and "scores" in found:
        return _ids_wrong(call, arguments, found, tolerance)
    return ""


def _ids_wrong(call: Call, arguments: Arguments, found: Results, tolerance: Tolerance) -> str:
    """Whether ids have the scores that they are said to have, which were found to be the best."""
    ids, scores, weight, x = found["ids"], found["scores"], arguments["weight"], arguments["x"]
    assert isinstance(ids, Tensor) and isinstance(scores, Tensor)
    assert isinstance(weight, Tensor) and isinstance(x, Tensor)
    n = call.sizes
    if bool(((ids < 0) | (ids >= n.public_vocab)).any()):
        return f"{call.op}.ids: expected 0..{n.public_vocab - 1}, got others"
    many = ids.reshape(*x[:, n.skip :].shape[:2], -1).long()
    rows = x[:, n.skip :].double().unsqueeze(-1)
    own = (weight[many].double() @ rows).squeeze(-1) * n.multiplier
    if n.softcap:
        own = n.softcap * torch.tanh(own / n.softcap)
    try:
        assert_matches(scores.reshape(own.shape), own, tolerance, f"{call.op}: scores of its ids")
    except AssertionError as error:
        return str(error)
    ordered = many.sort(-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        return f"{call.op}.ids: one id twice"
    return ""
