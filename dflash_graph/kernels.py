"""Which op has which kernel template, and how a call becomes holes and launch parameters.

A `KernelCase` is one specialised kernel with its launch parameters: geometry gives most holes, a
`Choice` the tiles and warps. The choices here are defaults, made to be right everywhere and good
on nothing in particular: tuned ones replace them node by node. What they fix for a weight (tiles
over its features, warps) does not depend on the number of rows, so neither do a row's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from dflash_graph.geometry import draft_geometry_from_config, target_geometry_from_config
from dflash_graph.graph import Graph, Node
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_startup
from dflash_graph.op import Attribute, Sizes, Specs
from dflash_graph.ops import get_op
from dflash_graph.options import MAX_BATCH, MAX_DRAFT_TOKENS
from dflash_graph.profiles import load_preset, preset_names
from dflash_graph.rendering import HoleValue, load, render

#: Row tiles that kernels are made for; rows of a round are padded to one by masks.
ROW_BUCKETS: Final = (16, 32, 64, 128)

#: Bytes of shared memory that the default choices plan with: a block's share on the device that
#: has least, compute capability 12.0.
SHARED_BUDGET: Final = 98 * 1024


@dataclass(frozen=True)
class Choice:
    """What tuning may change of one node: tile holes and launch parameters."""

    tiles: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class KernelCase:
    """A specialised kernel with its launch parameters.

    Args:
        op: the op it implements; the kernel is `<op>_kernel`.
        template: the template's name.
        holes: (name, value) of every hole, sorted.
        scalars: attributes of the op that `launch` takes as data.
    """

    op: str
    template: str
    holes: tuple[tuple[str, HoleValue], ...]
    num_warps: int
    num_stages: int
    scalars: tuple[str, ...] = ()

    def __str__(self) -> str:
        holes = " ".join(f"{name}={value}" for name, value in self.holes)
        return f"{self.template} {holes} warps={self.num_warps} stages={self.num_stages}"

    def module(self, cache_dir: str | Path | None = None) -> ModuleType:
        """The rendered and imported kernel; needs triton.

        Its `launch` takes tensors by the names of the op's arguments and outputs, the attributes
        in `scalars`, `num_warps` and `num_stages`.
        """
        return load(render(self.template, dict(self.holes), cache_dir=cache_dir))


@dataclass(frozen=True)
class _Kernel:
    """How calls of one op become cases of its template."""

    holes: Callable[[Sizes], Mapping[str, HoleValue]]
    choose: Callable[[Sizes, str], Choice]
    scalars: tuple[str, ...] = ()
    takes: Callable[[Sizes], bool] = field(default=lambda n: True)


def row_bucket(rows: int) -> int:
    """The row tile for a number of rows: the smallest that holds them, else the largest."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


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


def kernel_case(
    op: str,
    specs: Mapping[str, Specs],
    attributes: Mapping[str, Attribute],
    *,
    choice: Choice | None = None,
) -> KernelCase | None:
    """The kernel for one call.

    Args:
        op: name of the op.
        specs: argument -> spec.
        attributes: attribute -> value.
        choice: tiles and launch parameters; `default_choice` where there is none.

    Returns:
        The case, or None where no template computes this call.

    Raises:
        ShapeError: the call is outside the op's contract.
    """
    kernel = _KERNELS.get(op)
    if kernel is None:
        return None
    symbols, dtype = get_op(op).bind(specs, attributes)
    sizes = Sizes({**attributes, **symbols.sizes()})
    if not kernel.takes(sizes):
        return None
    choice = choice or kernel.choose(sizes, dtype)
    holes = {**kernel.holes(sizes), **choice.tiles, "dtype": dtype}
    return KernelCase(
        op, op, tuple(sorted(holes.items())), choice.num_warps, choice.num_stages, kernel.scalars
    )


def node_case(graph: Graph, node: Node) -> KernelCase | None:
    """The kernel for one node with its default choice, or None where it has no template."""
    specs: dict[str, Specs] = {
        argument: graph.values[names].spec
        if isinstance(names, str)
        else tuple(graph.values[name].spec for name in names)
        for argument, names in node.inputs.items()
    }
    return kernel_case(node.op, specs, node.attributes)


def kernel_cases(
    pair: ModelPair, *, draft_tokens: int = MAX_DRAFT_TOKENS, max_batch: int = MAX_BATCH
) -> tuple[KernelCase, ...]:
    """Every distinct kernel of a pair's rounds, in order of first use.

    With the largest K and batch, the rounds' row counts meet every row bucket that any smaller
    choice meets.
    """
    segments = declare_startup(
        pair, "triton", draft_tokens=draft_tokens, max_batch=max_batch, prefill_chunk=1
    )
    graphs = (graph for group in segments.values() for graph in group)
    return _distinct(
        node_case(graph, node)
        for graph in graphs
        if graph.key.backend == "triton"
        for node in graph.nodes
    )


def shipped_cases() -> tuple[KernelCase, ...]:
    """Every distinct kernel of the presets that ship: bfloat16, and float32 for the demo pairs."""
    return _distinct(case for pair in _shipped_pairs() for case in kernel_cases(pair))


def _shipped_pairs() -> Iterator[ModelPair]:
    for name in preset_names():
        preset = load_preset(name)
        target = target_geometry_from_config(preset["target"], f"{name}.target")
        draft = draft_geometry_from_config(preset["draft"], f"{name}.draft")
        for dtype in ("bfloat16", "float32") if name.startswith("demo") else ("bfloat16",):
            yield ModelPair(target, draft, dtype=dtype)


def _distinct(cases: Iterable[KernelCase | None]) -> tuple[KernelCase, ...]:
    return tuple(dict.fromkeys(case for case in cases if case is not None))


def _power_of_two(size: int, least: int = 16) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def _linear_choice(n: Sizes, dtype: str) -> Choice:
    """Enough programs to fill a device, and tens of kilobytes in flight for each.

    64 features are the M of a warp group's instruction on Hopper; narrow products take less, so
    that more programs share them. float32 has no tensor cores and takes small tiles, since the
    operands of a step stand in registers. Stages are what may depend on the rows: they overlap
    loads and leave the order of the sum alone.
    """
    if dtype == "float32":
        return Choice({"BLOCK_O": 32, "BLOCK_I": 32}, num_warps=4, num_stages=3)
    block_o = 64 if n.O >= 64 * 128 else 32 if n.O >= 32 * 128 else 16
    block_i = min(_power_of_two(n.I), 128)
    step = 2 * (block_o + row_bucket(n.B * n.W)) * block_i  # bytes
    steps = -(-n.I // block_i)
    num_stages = min(4, steps, max(2, 1 + SHARED_BUDGET // step))
    return Choice({"BLOCK_O": block_o, "BLOCK_I": block_i}, num_warps=4, num_stages=num_stages)


def _row_choice(hole: str, size: str, n: Sizes, dtype: str) -> Choice:
    """One row (or head) a program: some eight values a thread."""
    block = _power_of_two(n[size])
    return Choice({hole: block}, num_warps=min(16, max(1, block // 256)), num_stages=1)


_KERNELS: Final[Mapping[str, _Kernel]] = MappingProxyType(
    {
        "linear": _Kernel(
            holes=lambda n: {
                "O": n.O,
                "I": n.I,
                "unrounded": False,
                "BLOCK_R": row_bucket(n.B * n.W),
            },
            choose=_linear_choice,
            # Without tiles it is prefill's product over all rows, a library call.
            takes=lambda n: n.tiled,
        ),
        "rms_norm": _Kernel(
            holes=lambda n: {"H": n.H, "offset": n.offset},
            choose=partial(_row_choice, "BLOCK_H", "H"),
            scalars=("eps",),
        ),
        "swiglu": _Kernel(
            holes=lambda n: {"F": n.ffn_width},
            choose=lambda n, dtype: Choice({"BLOCK_F": 1024}, num_warps=4, num_stages=1),
        ),
        "gated_norm": _Kernel(
            holes=lambda n: {"HEADS": n.value_heads, "D": n.value_dim},
            choose=partial(_row_choice, "BLOCK_D", "value_dim"),
            scalars=("eps",),
        ),
        "head_norm_rope": _Kernel(
            holes=lambda n: {
                "query_parts": n.query_parts,
                "Q_HEADS": n.q_heads,
                "KV_HEADS": n.kv_heads,
                "D": n.head_dim,
                "R": n.rotary_half,
                "offset": n.offset,
            },
            choose=partial(_row_choice, "BLOCK_D", "head_dim"),
            scalars=("eps",),
        ),
    }
)
