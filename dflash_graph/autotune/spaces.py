"""Spaces: which tiles and launch parameters a family of ops may be tried with.

Tiles and warps order sums, so one choice holds for every number of rows (but see
`choices.Variation`), and ops whose bits must agree (the heads) share one. Stages, PDL, TRIGGER and
PREFETCH leave bits alone.
What a template does not declare is no axis, so a space survives a hole that comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from dflash_graph.choices import WARPS, Choice, Variation, variations_document
from dflash_graph.kernels.registry import power_of_two
from dflash_graph.op import Sizes

#: Stages that any kernel is tried with, where it has a loop to overlap.
DEPTHS: Final = (1, 2, 3, 4, 5, 6)
#: Tiles that change how dependent launches overlap, and nothing else.
LAUNCH_TILES: Final = {"TRIGGER": (0, 1, 2), "PREFETCH": (0, 256)}

Axes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Limits:
    """What candidates must fit.

    Args:
        shared: bytes of shared memory of a block.
        processors: multiprocessors.
        has_pdl: programmatic dependent launch exists (compute capability 9.0 on).
    """

    shared: int
    processors: int
    has_pdl: bool


@dataclass(frozen=True)
class Candidate:
    """A choice for all row tiles of a task.

    Args:
        tiles: sorted.
        num_stages: by row tile, sorted.
        own: (row tile, tiles, warps) of those that differ, sorted, see `choices.Variation`.
    """

    tiles: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: tuple[tuple[int, int], ...]
    pdl: bool = False
    own: tuple[tuple[int, tuple[tuple[str, int], ...], int | None], ...] = ()

    @classmethod
    def make(
        cls,
        tiles: Mapping[str, int],
        warps: int,
        stages: Mapping[int, int],
        pdl: bool,
        variations: Mapping[int, Variation] | None = None,
    ) -> Candidate:
        own = sorted(
            (rows, tuple(sorted(found.tiles.items())), found.num_warps)
            for rows, found in (variations or {}).items()
        )
        stages_of = tuple(sorted(stages.items()))
        return cls(tuple(sorted(tiles.items())), warps, stages_of, pdl, tuple(own))

    @property
    def order(self) -> tuple[object, ...]:
        """What is equal for candidates that differ in stages alone."""
        return self.tiles, self.num_warps, self.pdl, self.own

    @property
    def variations(self) -> dict[int, Variation]:
        """What row tiles have of their own."""
        return {rows: Variation(dict(tiles), warps) for rows, tiles, warps in self.own}

    def choice(self, rows: int) -> Choice:
        """The choice of a call with this row tile."""
        stages = dict(self.num_stages)[rows]
        choice = Choice(dict(self.tiles), self.num_warps, stages, self.pdl)
        own = self.variations.get(rows)
        return own.applied(choice) if own else choice

    def document(self) -> dict[str, object]:
        """As JSON values."""
        stages = {str(rows): count for rows, count in self.num_stages}
        return {
            "tiles": dict(self.tiles),
            "num_warps": self.num_warps,
            "num_stages": stages,
            "pdl": self.pdl,
        } | ({"variations": variations_document(self.variations)} if self.own else {})

    def __str__(self) -> str:
        tiles = " ".join(f"{name}={value}" for name, value in self.tiles)
        stages = "/".join(str(count) for _, count in self.num_stages)
        own = "".join(
            f" rows {rows}: {' '.join(f'{name}={value}' for name, value in differs)}"
            for rows, tiles, warps in self.own
            if (differs := (*tiles, *([("warps", warps)] if warps else ())))
        )
        return f"{tiles} warps={self.num_warps} stages={stages}{' pdl' if self.pdl else ''}{own}"


@dataclass(frozen=True)
class Space:
    """What one family is tried with.

    Args:
        keys: op -> the sizes that tell one entry from another; ops of one space share a choice
            where the values of `shares` agree.
        shares: op -> sizes whose values must agree, in order.
        tiles: sizes and dtype -> values of each tile that is tried; others stay as they are.
        warps: numbers of warps.
        depths: numbers of stages.
        shared: sizes, tiles, row tile, stages, bytes of an item -> estimate of shared memory.
        programs: sizes, tiles -> programs of a launch, 0 where it does not matter.
        prefix: a block may be cut to its first columns without changing their bits.
        tolerance: name of a bound in `testing`, by dtype and output.
    """

    keys: Mapping[str, tuple[str, ...]]
    tiles: Callable[[Sizes, str], Axes]
    shares: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warps: tuple[int, ...] = (4, 8)
    depths: tuple[int, ...] = (1,)
    shared: Callable[[Sizes, Mapping[str, int], int, int, int], int] = field(
        default=lambda n, tiles, rows, stages, item: 0
    )
    programs: Callable[[Sizes, Mapping[str, int]], int] = field(default=lambda n, tiles: 0)
    prefix: bool = True

    def explore(self, n: Sizes, dtype: str, limits: Limits, held: Candidate) -> list[Candidate]:
        """Every order of sums, launched as `held` is, with the deepest stages up to four."""
        axes = self._axes(n, dtype, held)
        found = []
        for values in product(*axes.values()):
            tiles = {**dict(held.tiles), **dict(zip(axes, values, strict=True))}
            for warps in self.warps:
                stages = {
                    rows: max(self._fitting(n, tiles, rows, dtype, limits, 4), default=0)
                    for rows, _ in held.num_stages
                }
                if all(stages.values()):
                    found.append(Candidate.make(tiles, warps, stages, held.pdl))
        busy = [c for c in found if self._keeps_busy(n, dict(c.tiles), limits)]
        return list(dict.fromkeys([held, *(busy or found)]))

    def refine(
        self, n: Sizes, dtype: str, limits: Limits, best: Iterable[Candidate]
    ) -> list[Candidate]:
        """Every number of stages and way of launching for the orders of sums in `best`."""
        found = []
        for candidate in best:
            tiles = dict(candidate.tiles)
            for launch, pdl in _launches(tiles, limits.has_pdl):
                for depth in self.depths:
                    stages = {
                        rows: max(
                            self._fitting(
                                n, candidate.choice(rows).tiles, rows, dtype, limits, depth
                            ),
                            default=0,
                        )
                        for rows, _ in candidate.num_stages
                    }
                    if all(stages.values()):
                        made = {**tiles, **launch}
                        own = candidate.variations
                        found.append(Candidate.make(made, candidate.num_warps, stages, pdl, own))
        return list(dict.fromkeys(found))

    def _axes(self, n: Sizes, dtype: str, held: Candidate) -> dict[str, tuple[int, ...]]:
        now = dict(held.tiles)
        return {
            name: tuple(sorted({*values, now[name]}))
            for name, values in self.tiles(n, dtype).items()
            if name in now
        }

    def _fitting(
        self,
        n: Sizes,
        tiles: Mapping[str, int],
        rows: int,
        dtype: str,
        limits: Limits,
        deepest: int,
    ) -> list[int]:
        """Stages up to `deepest` that leave a block enough shared memory."""
        item = 4 if dtype == "float32" else 2
        return [
            depth
            for depth in self.depths
            if depth <= deepest and self.shared(n, tiles, rows, depth, item) <= limits.shared
        ]

    def _keeps_busy(self, n: Sizes, tiles: Mapping[str, int], limits: Limits) -> bool:
        programs = self.programs(n, tiles)
        return not programs or limits.processors // 2 <= programs <= 32 * limits.processors


def _launches(tiles: Mapping[str, int], has_pdl: bool) -> Iterator[tuple[dict[str, int], bool]]:
    names = [name for name in LAUNCH_TILES if name in tiles]
    yield {name: tiles[name] for name in names}, False
    if has_pdl:
        for values in product(*(LAUNCH_TILES[name] for name in names)):
            yield dict(zip(names, values, strict=True)), True


# ---------------------------------------------------------------- products


def _product(
    op: str,
    keys: tuple[str, ...],
    outputs: Callable[[Sizes], int],
    inputs: Callable[[Sizes], int],
    *,
    splits: bool,
    more: Axes | None = None,
) -> Space:
    def tiles(n: Sizes, dtype: str) -> Axes:
        steps = -(-inputs(n) // 64)
        parts = (1, 2, 3, 4, 6, 8) if splits else ()
        if dtype == "float32":
            few = {"BLOCK_O": (16, 32, 64), "BLOCK_I": (16, 32, 64)}
            return {name: (more or {}).get(name, values) for name, values in few.items()}
        widest = power_of_two(inputs(n))
        return {
            "BLOCK_O": (32, 64, 128),
            "BLOCK_I": tuple(block for block in (64, 128, 256) if block <= widest) or (widest,),
            "SPLIT": tuple(part for part in parts if part <= max(1, steps // 4)),
            **(more or {}),
        }

    def programs(n: Sizes, tiles: Mapping[str, int]) -> int:
        return -(-outputs(n) // tiles["BLOCK_O"]) * tiles.get("SPLIT", 1)

    return Space(
        keys={op: keys},
        tiles=tiles,
        depths=DEPTHS,
        shared=lambda n, t, rows, stages, item: (
            item * stages * (t["BLOCK_O"] + rows) * t["BLOCK_I"]
        ),
        programs=programs,
    )


def _features(n: Sizes) -> int:
    return int(n.channels + n.value_width + 2 * n.heads)


def _scaled_inputs(n: Sizes) -> int:
    return int(64 * n.segments)


def _context(op: str, *, rings: bool) -> Space:
    def width(n: Sizes) -> int:
        return int(2 * n.kv_heads * n.head_dim * (n.layers if rings else 1))

    keys = ("kv_heads", "head_dim", "H", *(("layers",) if rings else ()))
    return _product(op, keys, width, lambda n: int(n.H), splits=True)


_PRODUCTS = (
    _product("linear", ("O", "I"), lambda n: n.O, lambda n: n.I, splits=True),
    _product("linear_norm", ("O", "I"), lambda n: n.O, lambda n: n.I, splits=True),
    _product("linear_residual_norm", ("O", "I"), lambda n: n.O, lambda n: n.I, splits=True),
    _product("linear_conv_residual_norm", ("O", "I"), lambda n: n.O, lambda n: n.I, splits=True),
    _product(
        "swiglu_linear",
        ("ffn_width", "I"),
        lambda n: 2 * n.ffn_width,
        lambda n: n.I,
        splits=False,
        more={"HALVES": (0, 1)},
    ),
    _product(
        "gdn_project",
        ("channels", "value_width", "heads", "H"),
        _features,
        lambda n: n.H,
        splits=False,
    ),
    _product(
        "linear_residual_scale",
        ("segments", "I"),
        lambda n: 64 * n.segments,
        lambda n: n.I,
        splits=False,
        more={"BLOCK_O": (64,)},
    ),
    _product("scaled_linear", ("O", "segments"), lambda n: n.O, _scaled_inputs, splits=False),
    _product(
        "scaled_swiglu_linear",
        ("ffn_width", "segments"),
        lambda n: 2 * n.ffn_width,
        _scaled_inputs,
        splits=False,
        more={"HALVES": (0, 1)},
    ),
    _product(
        "scaled_gdn_project",
        ("channels", "value_width", "heads", "segments"),
        _features,
        _scaled_inputs,
        splits=False,
    ),
    _product("conv_prepare", ("groups", "H"), lambda n: 4 * n.groups, lambda n: n.H, splits=True),
    _context("context_kv", rings=False),
    _context("context_rings", rings=True),
)

# ---------------------------------------------------------------- attention


def _attention(op: str, keys: tuple[str, ...]) -> Space:
    def tiles(n: Sizes, dtype: str) -> Axes:
        step = int(n.get("page_size", 128))
        if dtype == "float32":
            return {"WORKERS": (8, 16, 32, 64), "BLOCK_P": (16, 32)}
        # ROWS is no axis: for bfloat16 fewer than 64 give wrong products, see kernels.attention.
        return {
            "WORKERS": (8, 16, 32, 64),
            "BLOCK_P": tuple(block for block in (16, 32, 64, 128) if block <= step),
        }

    def shared(n: Sizes, t: Mapping[str, int], rows: int, stages: int, item: int) -> int:
        # Keys and values of a step for each stage, and the rows' queries.
        return item * t["BLOCK_D"] * (2 * stages * t["BLOCK_P"] + t["ROWS"])

    return Space(keys={op: keys}, tiles=tiles, depths=(1, 2, 3), shared=shared, prefix=False)


_ATTENTION = (
    _attention("gated_attention", ("N", "G", "D", "page_size")),
    _attention("ring_block_attention", ("N", "G", "D", "window", "causal")),
    _attention("paged_block_attention", ("N", "G", "D", "page_size", "causal")),
)

# ---------------------------------------------------------------- head, recurrence, rows

_HEAD = Space(
    keys={"head_scores": ("V", "H"), "head_argmax": ("V", "H"), "head_topk": ("V", "H", "top_k")},
    shares=dict.fromkeys(("head_scores", "head_argmax", "head_topk"), ("V", "H")),
    tiles=lambda n, dtype: (
        {"BLOCK_O": (16, 32, 64), "BLOCK_I": (16, 32, 64)}
        if dtype == "float32"
        else {"BLOCK_O": (64, 128, 256), "BLOCK_I": (32, 64, 128)}
    ),
    depths=DEPTHS,
    shared=lambda n, t, rows, stages, item: item * stages * (t["BLOCK_O"] + rows) * t["BLOCK_I"],
    programs=lambda n, t: -(-n.V // t["BLOCK_O"]),
    prefix=False,  # columns that are skipped stand first
)

_GDN = tuple(
    Space(keys={op: keys}, tiles=lambda n, dtype: {"BLOCK_V": (16, 32, 64)}, warps=warps)
    for op, keys, warps in (
        # What its launch takes with every tile: sums have one order then.
        ("gdn_mixer", ("key_heads", "key_dim", "value_heads", "value_dim", "taps"), (2, 4)),
        ("gdn_commit", ("Hk", "Dk", "Hv", "Dv", "depth"), (2, 4, 8)),
    )
)

_ROWS = tuple(
    Space(keys={op: keys}, tiles=lambda n, dtype: {}, warps=WARPS)
    for op, keys in (
        ("rms_norm", ("H",)),
        ("head_norm_rope", ("query_parts", "q_heads", "kv_heads", "head_dim")),
        ("rope_append", ("query_parts", "q_heads", "kv_heads", "head_dim", "page_size")),
    )
)

#: Every space; an op has one at most.
SPACES: Final[tuple[Space, ...]] = (*_PRODUCTS, *_ATTENTION, _HEAD, *_GDN, *_ROWS)


def space_of(op: str) -> Space | None:
    """The space of an op, or None where nothing is tried."""
    return next((space for space in SPACES if op in space.keys), None)


def tuned_ops() -> tuple[str, ...]:
    """Ops that have a space, sorted."""
    return tuple(sorted(op for space in SPACES for op in space.keys))
