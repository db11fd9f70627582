"""Weights: from checkpoints to the tensors that graphs read, each brought to the device once.

Uses are grouped into blocks, one storage each. A use whose parts are a contiguous run of another's,
in the same dtype, is a view of its block. On the CPU a block of one tensor that needs no conversion
is the mapped file itself; any other block is one allocation, filled slice by slice from the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from dflash_graph.checkpoint import Checkpoint
from dflash_graph.errors import (
    GraphError,
    MissingTensorError,
    ShapeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from dflash_graph.tensor import ITEM_BYTES, WeightUse

#: Called with the bytes done and the bytes in all.
Progress = Callable[[int, int], None]

#: A tensor may stand in two blocks (two dtypes, or two packings) only up to this size in bytes.
MAX_COPIED_BYTES: Final = 2**20

#: Elements converted and moved at a time; bounds what a conversion or a transfer holds besides.
_SLICE_ELEMENTS: Final = 2**24

_RANDOM_STD: Final = 0.02
_SHOWN: Final = 5
_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class WeightStore:
    """The weights of a set of uses, on one device.

    Args:
        tensors: the tensor of each use.
        nbytes: bytes of all storages, mapped ones included; a view counts once.
        mapped_nbytes: of these, bytes that are the mapped checkpoint itself.
    """

    def __init__(
        self, tensors: Mapping[WeightUse, torch.Tensor], nbytes: int, mapped_nbytes: int = 0
    ) -> None:
        self._tensors = tensors
        self.nbytes = nbytes
        self.mapped_nbytes = mapped_nbytes

    @classmethod
    def load(
        cls,
        checkpoints: Mapping[str, Checkpoint],
        uses: Iterable[WeightUse],
        device: str | torch.device,
        progress: Progress | None = None,
    ) -> WeightStore:
        """Build the tensor of every use.

        Args:
            checkpoints: by the role that begins a part's name: ``{"target": ..., "draft": ...}``.
            uses: every weight value of every graph; equal ones may repeat.
            device: where the tensors are to be.
            progress: called after each slice with done and total bytes.

        Raises:
            MissingTensorError: a part is in no checkpoint.
            UnexpectedTensorError: a checkpoint's tensor is read by no use.
            TensorShapeError: parts cannot be laid out in the shape of their use.
            GraphError: a large tensor would stand in two blocks.
            ShapeError: the spec of a use is no weight's.
        """
        sources = _Sources(checkpoints)
        parts_of = {use: sources.canonical(use) for use in dict.fromkeys(uses)}
        sources.check_all_read(part for parts in parts_of.values() for part in parts)
        for use, parts in parts_of.items():
            _check_shapes(use, [sources.tensor(part) for part in parts])
        sizes = {
            part: sources.tensor(part).numel() for parts in parts_of.values() for part in parts
        }
        blocks = _plan(parts_of, sizes)
        _check_copies(blocks, sizes)

        meter = _Meter(sum(block.nbytes for block in blocks), progress)
        tensors: dict[WeightUse, torch.Tensor] = {}
        mapped = 0
        for block in blocks:
            first = sources.tensor(block.parts[0])
            dtype = _DTYPES[block.dtype]
            if len(block.parts) == 1 and first.dtype == dtype and _is_cpu(device):
                storage = first.view(-1)
                mapped += block.nbytes
                meter.add(block.nbytes)
            else:
                storage = torch.empty(block.numel, dtype=dtype, device=device)
                offset = 0
                for part in block.parts:
                    source = sources.tensor(part).view(-1)
                    _copy(storage[offset : offset + source.numel()], source, meter)
                    offset += source.numel()
            tensors |= block.views(storage)
        return cls(tensors, meter.total, mapped)

    def __getitem__(self, use: WeightUse) -> torch.Tensor:
        if use not in self._tensors:
            raise GraphError(
                f"weight {' + '.join(use.parts)} {use.spec}: expected one of the "
                f"{len(self._tensors)} uses that were loaded; load with every graph's uses"
            )
        return self._tensors[use]

    def __contains__(self, use: object) -> bool:
        return use in self._tensors

    def __iter__(self) -> Iterator[WeightUse]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def random_weights(uses: Iterable[WeightUse], seed: int, device: str | torch.device) -> WeightStore:
    """Weights of sensible scale without a checkpoint, for benchmarks of any geometry.

    Matrices, kernels and codebooks are normal with deviation 0.02. Norms of a target are zero (they
    are offsets from one), its GDN output norm and all norms of a draft one. `A_log` is the log of a
    uniform value in 1..16, `dt_bias` one. `base_kernel` passes a column through (first tap one,
    second zero). One seed gives the same values on the same device.

    Args:
        uses: every weight value of every graph.
        seed: of the generator.
        device: where the tensors are made.

    Raises:
        GraphError: where a run of parts begins in its block does not follow from the uses.
        ShapeError: the spec of a use is no weight's.
    """
    parts_of = {use: use.parts for use in dict.fromkeys(uses)}
    sizes = {use.parts[0]: _numel(use) for use in parts_of if len(use.parts) == 1}
    blocks = _plan(parts_of, sizes)
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors: dict[WeightUse, torch.Tensor] = {}
    for block in blocks:
        storage = torch.empty(block.numel, dtype=_DTYPES[block.dtype], device=device)
        _randomize(block.parts, storage, generator)
        tensors |= block.views(storage)
    return WeightStore(tensors, sum(block.nbytes for block in blocks))


@dataclass
class _Block:
    """One storage: parts in a row in one dtype, and the uses that view it, with their offsets."""

    parts: tuple[str, ...]
    dtype: str
    numel: int
    members: list[tuple[WeightUse, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    def views(self, storage: torch.Tensor) -> dict[WeightUse, torch.Tensor]:
        """The tensor of each member, a view of the flat `storage`."""
        return {
            use: storage[offset : offset + _numel(use)].view(use.spec.bind({}))
            for use, offset in self.members
        }


class _Sources:
    """The tensors of all checkpoints, by part name: role, slash, logical name."""

    def __init__(self, checkpoints: Mapping[str, Checkpoint]) -> None:
        self._checkpoints = checkpoints
        self._tensors: dict[str, torch.Tensor] = {}

    def canonical(self, use: WeightUse) -> tuple[str, ...]:
        """The parts of a use with tied names replaced by what serves them."""
        return tuple(self._canonical(part) for part in use.parts)

    def tensor(self, part: str) -> torch.Tensor:
        if part not in self._tensors:
            role, _, name = part.partition("/")
            self._tensors[part] = self._checkpoints[role].tensor(name)
        return self._tensors[part]

    def check_all_read(self, parts: Iterable[str]) -> None:
        read = set(parts)
        stored = [
            f"{role}/{name}"
            for role, checkpoint in self._checkpoints.items()
            for name in checkpoint.shapes
        ]
        unread = [part for part in stored if part not in read]
        if unread:
            raise UnexpectedTensorError(
                f"weights: expected a use of each of the {len(stored)} tensors, {len(unread)} are "
                f"read by none: {', '.join(unread[:_SHOWN])}; load with every graph's uses"
            )

    def _canonical(self, part: str) -> str:
        role, _, name = part.partition("/")
        checkpoint = self._checkpoints.get(role)
        if checkpoint is None:
            raise MissingTensorError(
                f"weights: {part}: expected a role among {sorted(self._checkpoints)}, got {role!r}"
            )
        if name not in checkpoint:
            raise MissingTensorError(
                f"weights: {part}: expected a tensor of {checkpoint.directory}, got none of that "
                f"name; it has {len(checkpoint.shapes)}, e.g. {next(iter(checkpoint.shapes))!r}"
            )
        return f"{role}/{checkpoint.resolve(name)}"


class _Meter:
    """Counts bytes towards a total and reports them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress:
            self._progress(self._done, self.total)


def _plan(parts_of: Mapping[WeightUse, Sequence[str]], sizes: Mapping[str, int]) -> list[_Block]:
    """Group uses into blocks, those with most parts first; a contiguous run joins the first fit.

    Args:
        parts_of: the parts of each use.
        sizes: elements of a part, as far as they are known.
    """
    blocks: list[_Block] = []
    at: dict[tuple[str, str], list[tuple[_Block, int]]] = {}  # (dtype, part) -> block, index
    for use in sorted(parts_of, key=lambda use: -len(parts_of[use])):
        parts, dtype = tuple(parts_of[use]), use.spec.dtype
        numel = _numel(use)
        for block, start in at.get((dtype, parts[0]), ()):
            if block.parts[start : start + len(parts)] == parts:
                block.members.append((use, _offset(use, block, start, len(parts), sizes)))
                break
        else:
            block = _Block(parts, dtype, numel, [(use, 0)])
            blocks.append(block)
            for index, part in enumerate(parts):
                at.setdefault((dtype, part), []).append((block, index))
    return blocks


def _offset(use: WeightUse, block: _Block, start: int, count: int, sizes: Mapping[str, int]) -> int:
    """First element of a run in its block, counted from either end, whichever sizes are known."""
    before, after = block.parts[:start], block.parts[start + count :]
    numel = _numel(use)
    if all(part in sizes for part in before):
        offset = sum(sizes[part] for part in before)
    elif all(part in sizes for part in after):
        offset = block.numel - numel - sum(sizes[part] for part in after)
    else:
        raise GraphError(
            f"weight {' + '.join(use.parts)}: expected a use of each single part of "
            f"{' + '.join(block.parts)} before it, got none of some; its offset is unknown"
        )
    if not 0 <= offset <= block.numel - numel:
        raise GraphError(
            f"weight {' + '.join(use.parts)}: expected a run inside the {block.numel} elements of "
            f"{' + '.join(block.parts)}, got {numel} elements from {offset}"
        )
    return offset


def _check_copies(blocks: Iterable[_Block], sizes: Mapping[str, int]) -> None:
    homes: dict[str, _Block] = {}
    for block in blocks:
        for part in block.parts:
            other = homes.get(part)
            homes[part] = block
            nbytes = sizes[part] * ITEM_BYTES[block.dtype]
            if other is not None and nbytes > MAX_COPIED_BYTES:
                raise GraphError(
                    f"weight {part}: expected one storage for a tensor above {MAX_COPIED_BYTES} "
                    f"bytes, got {nbytes} bytes in {' + '.join(other.parts)} ({other.dtype}) and "
                    f"again in {' + '.join(block.parts)} ({block.dtype}); let the uses agree"
                )


def _check_shapes(use: WeightUse, tensors: Sequence[torch.Tensor]) -> None:
    """Each part must fold into rows of the use's trailing shape, and the rows must add up."""
    elements = _numel(use)
    rows, *trailing = use.spec.bind({})
    width = elements // rows
    found = 0
    for name, tensor in zip(use.parts, tensors, strict=True):
        count, rest = divmod(tensor.numel(), width)
        if rest or not _folds(tuple(tensor.shape), (count, *trailing)):
            raise TensorShapeError(
                f"weights: {name}: expected rows of shape {trailing} ({use.spec} of the graph), "
                f"got a tensor of shape {list(tensor.shape)}"
            )
        found += count
    if found != rows:
        raise TensorShapeError(
            f"weights: {' + '.join(use.parts)}: expected {rows} rows ({use.spec} of the graph), "
            f"got {found}"
        )


def _folds(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether one shape only merges axes of the other; a transposed shape does not pass."""

    def strides(axes: tuple[int, ...]) -> set[int]:
        return {math.prod(axes[index:]) for index in range(len(axes) + 1)}

    ours, theirs = strides(shape), strides(other)
    return ours <= theirs or theirs <= ours


def _copy(target: torch.Tensor, source: torch.Tensor, meter: _Meter) -> None:
    """Fill `target` from the mapped `source`, converting and moving one slice at a time."""
    for start in range(0, source.numel(), _SLICE_ELEMENTS):
        piece = target[start : start + _SLICE_ELEMENTS]
        piece.copy_(source[start : start + _SLICE_ELEMENTS])
        meter.add(piece.numel() * piece.element_size())


def _randomize(parts: Sequence[str], storage: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one block; its parts play the same kind of role, so the first one names the rule."""
    role, _, name = parts[0].partition("/")
    if name.endswith("A_log"):
        storage.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias"):
        storage.fill_(1.0)
    elif name.endswith("norm.weight"):
        is_offset = role == "target" and not name.endswith("linear_attn.norm.weight")
        storage.fill_(0.0 if is_offset else 1.0)
    elif name.endswith("base_kernel"):
        taps = storage.view(2 * len(parts), 2, -1)  # [sides, taps, H]
        taps[:, 0], taps[:, 1] = 1.0, 0.0
    else:
        storage.normal_(0.0, _RANDOM_STD, generator=generator)


def _numel(use: WeightUse) -> int:
    """Elements of a use, whose spec must be a weight's: parts, fixed axes and floating point."""
    spec = use.spec
    is_fixed = all(isinstance(axis, int) and axis > 0 for axis in spec.shape)
    if not use.parts or not spec.shape or not is_fixed or spec.dtype not in _DTYPES:
        raise ShapeError(
            f"weight {' + '.join(use.parts)}: expected parts, fixed axes and a dtype among "
            f"{sorted(_DTYPES)}, got {spec}"
        )
    return spec.numel()


def _is_cpu(device: str | torch.device) -> bool:
    return torch.device(device).type == "cpu"
