"""Which op has which kernel template, and how a call becomes holes and launch parameters.

A `KernelCase` is one specialised kernel file with its launch parameters: geometry gives most holes,
a `Choice` the tiles and warps. The choices made here are defaults: tuned ones replace them node by
node. What they fix for a weight or a head (tiles, splits, warps) does not depend on the number of
rows, so neither do a row's bits.

The families beside this module register one `Kernel` for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from dflash_graph.choices import Choice, Choices
from dflash_graph.op import Attribute, Sizes, Specs
from dflash_graph.ops import get_op
from dflash_graph.rendering import HoleValue, cache_folder, load, render

#: Row tiles that kernels are made for; rows of a round are padded to one by masks.
ROW_BUCKETS: Final = (16, 32, 64, 128)

#: Bytes of shared memory that the default choices plan with: a block's share on the device that
#: has least, compute capability 12.0.
SHARED_BUDGET: Final = 98 * 1024


@dataclass(frozen=True)
class KernelCase:
    """A specialised kernel file with its launch parameters.

    Args:
        op: the op it implements.
        template: the template's name.
        holes: (name, value) of every hole, sorted.
        scalars: attributes of the op that `launch` takes as data.
        workspace: bytes of scratch that a launch needs besides its outputs, 0 for none.
    """

    op: str
    template: str
    holes: tuple[tuple[str, HoleValue], ...]
    num_warps: int
    num_stages: int
    scalars: tuple[str, ...] = ()
    #: Not what tells one case from another: it follows the number of rows, the kernels do not.
    workspace: int = field(default=0, compare=False)

    def __str__(self) -> str:
        holes = " ".join(f"{name}={value}" for name, value in self.holes)
        return f"{self.template} {holes} warps={self.num_warps} stages={self.num_stages}"

    def module(self, cache_dir: str | Path | None = None) -> ModuleType:
        """The rendered and imported file; needs triton. It has

        * `KERNELS`: name of a kernel in it -> its signature, argument -> triton type;
        * `WARPS`, optionally: name -> number of warps of a kernel that does not take the case's;
        * `AHEAD`, optionally: arguments that a kernel reads before it waits for the launch before
          it (dependent launches): no launch of a segment may write them;
        * `prepare`, optionally: called once with all tensors by name, before any launch; returns
          further arguments for `launch` (tables of addresses, for example), which live as long as
          the binding;
        * `launch`: takes tensors by the names of the op's arguments and outputs (lists where an
          argument is variadic), the attributes in `scalars`, what `prepare` returned, `workspace`
          (uint8) if the case asks for one, `num_warps` and `num_stages`. It allocates nothing.
        """
        return _module(self.template, self.holes, cache_folder(cache_dir))


@cache
def _module(template: str, holes: tuple[tuple[str, HoleValue], ...], folder: Path) -> ModuleType:
    """Rendered once a process: a round has many nodes of one case."""
    return load(render(template, dict(holes), cache_dir=folder))


@dataclass(frozen=True)
class Kernel:
    """How calls of one op become cases of a template.

    Args:
        op: the op.
        holes: geometry of a call -> values of the template's holes, but for those of a choice,
            `dtype` and `pdl`.
        choose: sizes and model dtype -> the default choice.
        template: the template's name; the op's by default.
        scalars: attributes that `launch` takes as data.
        takes: whether the template computes a call of these sizes.
        rows: of a call, by which its row tile goes; B W by default.
        workspace: bytes of scratch of a call.
        typed: the template has a `dtype` hole.
    """

    op: str
    holes: Callable[[Sizes], Mapping[str, HoleValue]]
    choose: Callable[[Sizes, str], Choice]
    template: str = ""
    scalars: tuple[str, ...] = ()
    takes: Callable[[Sizes], bool] = field(default=lambda n: True)
    rows: Callable[[Sizes], int] = field(default=lambda n: n.get("B", 1) * n.get("W", 1))
    workspace: Callable[[Sizes, Choice], int] = field(default=lambda n, choice: 0)
    typed: bool = True


_KERNELS: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Make `kernel` what its op is bound to."""
    if kernel.op in _KERNELS:
        raise AssertionError(f"op {kernel.op!r} has two kernels")
    _KERNELS[kernel.op] = kernel
    return kernel


def registered(op: str) -> Kernel:
    """What an op is bound to."""
    return _KERNELS[op]


def row_bucket(rows: int) -> int:
    """The row tile for a number of rows: the smallest that holds them, else the largest."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


def row_tile(op: str, sizes: Sizes) -> int:
    """The row tile of a call, by which what was measured is looked up."""
    return row_bucket(_KERNELS[op].rows(sizes))


def kernel_ops() -> tuple[str, ...]:
    """The ops that have a template, sorted."""
    return tuple(sorted(_KERNELS))


def default_choice(op: str, sizes: Sizes, dtype: str) -> Choice:
    """The choice where nothing is tuned.

    Args:
        op: one of `kernel_ops`.
        sizes: symbols and attributes of the call.
        dtype: the model dtype.
    """
    return _KERNELS[op].choose(sizes, dtype)


def device_choice(op: str, sizes: Sizes, dtype: str, rows: int, choices: Choices | None) -> Choice:
    """The choice of a device for a call, or the template's default.

    Args:
        op, sizes, dtype: as for `default_choice`.
        rows: the row tile of the call.
        choices: of the device; None for the defaults alone.
    """
    if choices is None:
        return default_choice(op, sizes, dtype)
    found = choices.find(op, sizes, dtype, rows)
    if found is None:
        return replace(default_choice(op, sizes, dtype), pdl=choices.pdl)
    return completed_choice(found, op, sizes, dtype)


def completed_choice(choice: Choice, op: str, sizes: Sizes, dtype: str) -> Choice:
    """A choice in which a hole that is newer has its default."""
    return replace(choice, tiles={**default_choice(op, sizes, dtype).tiles, **choice.tiles})


def kernel_case(
    op: str,
    specs: Mapping[str, Specs],
    attributes: Mapping[str, Attribute],
    *,
    choice: Choice | None = None,
    choices: Choices | None = None,
    model_dtype: str | None = None,
) -> KernelCase | None:
    """The kernel for one call.

    Args:
        op: name of the op.
        specs: argument -> spec.
        attributes: attribute -> value.
        choice: tiles and launch parameters.
        choices: what was measured on the device that the kernel is for; the template's default
            stands where neither says anything.
        model_dtype: the model dtype where no argument shows it.

    Returns:
        The case, or None where no template computes this call.

    Raises:
        ShapeError: the call is outside the op's contract.
    """
    kernel = _KERNELS.get(op)
    if kernel is None:
        return None
    symbols, dtype = get_op(op).bind(specs, attributes, model_dtype=model_dtype)
    sizes = Sizes({**attributes, **symbols.sizes()})
    if not kernel.takes(sizes):
        return None
    if choice is None:
        choice = device_choice(op, sizes, dtype, row_tile(op, sizes), choices)
    else:
        choice = completed_choice(choice, op, sizes, dtype)
    holes = {**kernel.holes(sizes), **choice.tiles, "pdl": choice.pdl}
    if kernel.typed:
        holes["dtype"] = dtype
    return KernelCase(
        op,
        kernel.template or op,
        tuple(sorted(holes.items())),
        choice.num_warps,
        choice.num_stages,
        kernel.scalars,
        kernel.workspace(sizes, choice),
    )


def power_of_two(size: int, least: int = 16) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def row_choice(hole: str, size: str, n: Sizes, dtype: str) -> Choice:
    """One row (or head) a program: some eight values a thread."""
    block = power_of_two(n[size])
    return Choice({hole: block}, num_warps=min(16, max(1, block // 256)), num_stages=1)
