"""Checkpoints: a directory of safetensors, checked against a geometry and read by logical name.

A logical name is the stored one without the model's prefix: `layers.3.mlp.gate_proj.weight`,
`embed_tokens.weight`, `lm_head.weight`. Opening reads headers only: every name, shape and dtype is
checked before a weight is touched. Tensors are views of the memory-mapped file; nothing is copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from dflash_graph.errors import (
    CheckpointError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from dflash_graph.geometry import LINEAR, DraftGeometry, MoeFfn, TargetGeometry

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

#: Stored dtypes (safetensors' names) that load as weights.
DTYPES: Final = ("BF16", "F16", "F32")

Shape = tuple[int, ...]

_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "embed_tokens.weight"
_CODEBOOKS: Final = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
_SHOWN_NAMES: Final = 5
#: Of a file's name, as file systems have it.
_NAME_MAX: Final = 255


@dataclass(frozen=True)
class Layout:
    """What a checkpoint must hold, and under which stored names.

    Args:
        shapes: every tensor, by logical name.
        stored: other stored names a tensor may have, stored -> logical. Without an entry a logical
            name is stored as it is, after `prefix`.
        prefix: stands before every stored name that `stored` does not list.
        ignored: patterns (shell style) of stored names that no part of the text model reads.
        aliases: logical names served from another tensor.
        origins: where an uncommon shape was fixed, for errors, by logical name.
    """

    shapes: Mapping[str, Shape]
    stored: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    aliases: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    def logical(self, stored: str) -> str | None:
        """The logical name of a stored one; None where it has none."""
        if stored in self.stored:
            return self.stored[stored]
        name = stored.removeprefix(self.prefix)
        known = name in self.shapes and stored.startswith(self.prefix)
        return name if known and name not in self.stored.values() else None

    def is_ignored(self, stored: str) -> bool:
        return any(fnmatchcase(stored, pattern) for pattern in self.ignored)


def target_schema(geometry: TargetGeometry) -> dict[str, Shape]:
    """Shape of every tensor of a target, by logical name; a tied head is no tensor of its own."""
    hidden = geometry.hidden
    shapes: dict[str, Shape] = {_EMBEDDING: (geometry.vocab, hidden), "norm.weight": (hidden,)}
    if not geometry.tied_head:
        shapes[_HEAD] = (geometry.vocab, hidden)
    for index, kind in enumerate(geometry.layer_types):
        layer = f"layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if kind == LINEAR:
            shapes |= _gdn_schema(geometry, f"{layer}.linear_attn")
        else:
            # A query head and its gate stand side by side in q_proj.
            shapes |= _attention_schema(geometry, f"{layer}.self_attn", q_rows=2)
        if isinstance(geometry.ffn, MoeFfn):
            shapes |= _moe_schema(geometry.ffn, hidden, f"{layer}.mlp")
        else:
            shapes |= _ffn_schema(f"{layer}.mlp", hidden, geometry.ffn.width)
    return shapes


def draft_schema(geometry: DraftGeometry) -> dict[str, Shape]:
    """Shape of every tensor of a draft, by logical name."""
    hidden = geometry.hidden
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, geometry.feature_width),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(geometry.layers):
        layer = f"layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes |= _attention_schema(geometry, f"{layer}.self_attn", q_rows=1)
        shapes |= _ffn_schema(f"{layer}.mlp", hidden, geometry.ffn_width)
        if geometry.conv:
            taps = geometry.conv.taps
            for conv in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
                shapes[f"{conv}.base_kernel"] = (2, taps, hidden)
                shapes[f"{conv}.kernel_projection.weight"] = (
                    2 * taps * geometry.conv_groups,
                    hidden,
                )
    if geometry.selector:
        rank = geometry.selector.rank
        shapes |= {name: (geometry.vocab, rank) for name in _CODEBOOKS}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    return shapes


def target_layout(geometry: TargetGeometry) -> Layout:
    """The layout of a target: vision and multi-token-prediction weights are left aside."""
    ignored = ("model.visual.*", "mtp.*", "model.mtp.*", "*.rotary_emb.inv_freq")
    return Layout(
        shapes=target_schema(geometry),
        stored={} if geometry.tied_head else {_HEAD: _HEAD},
        prefix=geometry.weight_prefix,
        ignored=(*ignored, _HEAD) if geometry.tied_head else ignored,
        aliases={_HEAD: _EMBEDDING} if geometry.tied_head else {},
    )


def draft_layout(geometry: DraftGeometry) -> Layout:
    """The layout of a draft: names as stored, codebooks with or without `.weight`."""
    spellings = {name + ending: name for name in _CODEBOOKS for ending in ("", ".weight")}
    blocks = len(geometry.target_layer_ids)
    return Layout(
        shapes=draft_schema(geometry),
        stored=spellings if geometry.selector else {},
        origins={"fc.weight": f"hidden_size {geometry.hidden} and {blocks} target_layer_ids"},
    )


class Checkpoint:
    """An opened, checked checkpoint; tensors by logical name."""

    def __init__(self, directory: Path, layout: Layout, places: Mapping[str, _Place]) -> None:
        self.directory = directory
        self.shapes: Mapping[str, Shape] = layout.shapes
        self._aliases = layout.aliases
        self._places = places

    @classmethod
    def open(cls, directory: str | Path, layout: Layout) -> Checkpoint:
        """Open a directory and check every header against `layout`.

        Args:
            directory: holds `model.safetensors`, or shards and `model.safetensors.index.json`; the
                single file is taken where both are there.
            layout: `target_layout(geometry)` or `draft_layout(geometry)`.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt, or the index is.
            MissingTensorError: tensors are in no file, or not in the shard the index names.
            UnexpectedTensorError: a tensor has no role, or is stored twice.
            TensorShapeError: a shape differs from the geometry's.
            TensorDtypeError: a dtype is not one of BF16, F16, F32.
        """
        folder = Path(directory)
        stored = _read_headers(folder)
        places: dict[str, _Place] = {}
        unexpected: list[str] = []
        for name, place in stored.items():
            logical = layout.logical(name)
            if logical is None:
                if not layout.is_ignored(name):
                    unexpected.append(name)
            elif logical in places:
                raise UnexpectedTensorError(
                    f"{place.path}: expected tensor {logical!r} once, got it as {name!r} and as "
                    f"{places[logical].name!r} in {places[logical].path.name}"
                )
            else:
                places[logical] = place
        missing = [name for name in layout.shapes if name not in places]
        if missing:
            extra = f", beside unexpected {_listed(unexpected)}" if unexpected else ""
            raise MissingTensorError(
                f"{folder}: expected {len(layout.shapes)} tensors (config.json), {len(missing)} "
                f"are missing: {_listed(missing)}{extra}; check that weights and config belong "
                "together"
            )
        if unexpected:
            raise UnexpectedTensorError(
                f"{folder}: expected no tensor without a role (config.json), "
                f"got {len(unexpected)}: {_listed(unexpected)}; "
                "check that weights and config belong together"
            )
        for name, place in places.items():
            place.check(name, layout)
        return cls(folder, layout, places)

    def resolve(self, name: str) -> str:
        """The tensor that serves a logical name: itself, or what it is tied to."""
        return self._aliases.get(name, name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.resolve(name) in self._places

    def tensor(self, name: str) -> torch.Tensor:
        """The stored tensor, a view of the mapped file in its stored dtype; do not write to it.

        Raises:
            MissingTensorError: there is no tensor of this name.
        """
        if name not in self:
            raise MissingTensorError(
                f"{self.directory}: no tensor {name!r}; there are {_listed(list(self._places))}"
            )
        place = self._places[self.resolve(name)]
        tensor: torch.Tensor = place.file.get_tensor(place.name)
        return tensor


@dataclass(frozen=True)
class _Place:
    """One stored tensor: its file, opened, and what the header says of it."""

    path: Path
    file: Any
    name: str
    shape: Shape
    dtype: str

    def check(self, logical: str, layout: Layout) -> None:
        if self.dtype not in DTYPES:
            raise TensorDtypeError(
                f"{self.path}: {self.name}: expected dtype {' or '.join(DTYPES)}, "
                f"got {self.dtype}; quantized weights are not supported"
            )
        expected = layout.shapes[logical]
        if self.shape != expected:
            origin = layout.origins.get(logical, "config.json")
            raise TensorShapeError(
                f"{self.path}: {self.name}: expected shape {list(expected)} ({origin}), "
                f"got {list(self.shape)}"
            )


def _read_headers(folder: Path) -> dict[str, _Place]:
    """Every stored tensor of a directory, by stored name."""
    if (folder / SINGLE_FILE).exists():
        return _open_file(folder / SINGLE_FILE)
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        found = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
        raise CheckpointError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got {_listed(found)}"
        )
    index = _read_index(index_path)
    shards = sorted(set(index.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{index_path}: expected {len(shards)} shards beside it, {len(absent)} are missing: "
            f"{_listed(absent)}; complete the download"
        )
    stored: dict[str, _Place] = {}
    for shard in shards:
        places = _open_file(folder / shard)
        lacking = [name for name, home in index.items() if home == shard and name not in places]
        if lacking:
            raise MissingTensorError(
                f"{folder / shard}: expected the tensors that {INDEX_FILE} places there, "
                f"{len(lacking)} are missing: {_listed(lacking)}"
            )
        for name, place in places.items():
            if index.get(name) != shard:
                home = f"it in {index[name]}" if name in index else "no such tensor"
                raise UnexpectedTensorError(
                    f"{place.path}: expected only tensors that {INDEX_FILE} places there, "
                    f"got {name!r}; the index has {home}"
                )
        stored |= places
    return stored


def _read_index(path: Path) -> Mapping[str, str]:
    """The index's map from tensor to shard."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected a JSON index, got broken text: {error}") from None
    index = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: weight_map: expected an object of tensor to shard names")
    for name, shard in index.items():
        is_name = isinstance(shard, str) and 0 < len(shard) <= _NAME_MAX
        if not is_name or Path(shard).name != shard:
            raise CheckpointError(
                f"{path}: weight_map: {name}: expected a file name beside the index, got "
                f"{shard!r:.80}"
            )
    return index


def _open_file(path: Path) -> dict[str, _Place]:
    """Map one file; safetensors checks that its header covers the file exactly."""
    try:
        file: Any = safe_open(str(path), framework="pt", device="cpu")
        places = {}
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part = file.get_slice(name)
            places[name] = _Place(path, file, name, tuple(part.get_shape()), part.get_dtype())
    except (SafetensorError, OSError) as error:
        size = f"{path.stat().st_size} bytes" if path.is_file() else "no regular file"
        raise CheckpointError(
            f"{path}: expected a complete safetensors file, got {size}: {error}; fetch it again"
        ) from None
    return places


def _listed(names: Iterable[str]) -> str:
    """The first few names and how many there are."""
    names = list(names)
    if not names:
        return "nothing"
    rest = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + rest


def _attention_schema(
    geometry: TargetGeometry | DraftGeometry, name: str, *, q_rows: int
) -> dict[str, Shape]:
    attention, hidden = geometry.attention, geometry.hidden
    return {
        f"{name}.q_proj.weight": (q_rows * attention.q_width, hidden),
        f"{name}.k_proj.weight": (attention.kv_width, hidden),
        f"{name}.v_proj.weight": (attention.kv_width, hidden),
        f"{name}.o_proj.weight": (hidden, attention.q_width),
        f"{name}.q_norm.weight": (attention.head_dim,),
        f"{name}.k_norm.weight": (attention.head_dim,),
    }


def _gdn_schema(geometry: TargetGeometry, name: str) -> dict[str, Shape]:
    gdn, hidden = geometry.gdn, geometry.hidden
    assert gdn is not None, "a geometry with linear layers has a GDN"
    return {
        f"{name}.in_proj_qkv.weight": (gdn.conv_channels, hidden),
        f"{name}.in_proj_z.weight": (gdn.value_width, hidden),
        f"{name}.in_proj_b.weight": (gdn.value_heads, hidden),
        f"{name}.in_proj_a.weight": (gdn.value_heads, hidden),
        f"{name}.conv1d.weight": (gdn.conv_channels, 1, gdn.conv_taps),
        f"{name}.A_log": (gdn.value_heads,),
        f"{name}.dt_bias": (gdn.value_heads,),
        f"{name}.norm.weight": (gdn.value_dim,),
        f"{name}.out_proj.weight": (hidden, gdn.value_width),
    }


def _ffn_schema(name: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }


def _moe_schema(ffn: MoeFfn, hidden: int, name: str) -> dict[str, Shape]:
    return {
        f"{name}.gate.weight": (ffn.experts, hidden),
        # Gate rows first, then up rows.
        f"{name}.experts.gate_up_proj": (ffn.experts, 2 * ffn.expert_width, hidden),
        f"{name}.experts.down_proj": (ffn.experts, hidden, ffn.expert_width),
        f"{name}.shared_expert_gate.weight": (1, hidden),
        **_ffn_schema(f"{name}.shared_expert", hidden, ffn.shared_width),
    }
