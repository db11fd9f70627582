"""Checkpoints: names, shapes and dtypes against a geometry, damaged files, no copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_graph.checkpoint import (
    Checkpoint,
    Layout,
    draft_layout,
    draft_schema,
    target_layout,
    target_schema,
)
from dflash_graph.errors import (
    CheckpointError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from dflash_graph.geometry import (
    FULL,
    LINEAR,
    AttentionGeometry,
    DenseFfn,
    GdnGeometry,
    TargetGeometry,
    read_draft_geometry,
    read_target_geometry,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LAYOUT = Layout({"a.weight": (4, 2), "b.weight": (3,)}, origins={"a.weight": "4 a_heads"})
TENSORS = {"a.weight": torch.arange(8.0).view(4, 2), "b.weight": torch.arange(3.0)}


def target_geometry(**changes: Any) -> TargetGeometry:
    values: dict[str, Any] = {
        "architecture": "Qwen3_5ForCausalLM",
        "hidden": 8,
        "vocab": 12,
        "layer_types": (LINEAR, FULL),
        "attention": AttentionGeometry(2, 1, 4, 2, 1e4),
        "gdn": GdnGeometry(1, 2, 4, 4, 4),
        "ffn": DenseFfn(6),
        "norm_eps": 1e-6,
        "tied_head": False,
        "mrope_section": (1, 0, 0),
        "weight_prefix": "model.",
        "dtype": None,
    }
    return TargetGeometry(**(values | changes))


def stored_target(geometry: TargetGeometry) -> dict[str, torch.Tensor]:
    """Every tensor of a target under its stored name."""
    return {
        name if name == "lm_head.weight" else geometry.weight_prefix + name: torch.randn(shape)
        for name, shape in target_schema(geometry).items()
    }


def save_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Write shards and their index; the index's map comes back."""
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(directory, index)
    return index


def write_index(directory: Path, index: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    "case", ["target_dense_2x", "target_dense_2x_composite", "target_moe", "dflash2_g16"]
)
def test_golden_checkpoints_open_and_hold_their_tensors(case: str) -> None:
    directory = GOLDEN / case
    if case.startswith("target"):
        geometry = read_target_geometry(directory)
        layout, prefix = target_layout(geometry), geometry.weight_prefix
    else:
        layout, prefix = draft_layout(read_draft_geometry(directory)), ""
    checkpoint = Checkpoint.open(directory, layout)
    stored = load_file(directory / "model.safetensors")
    for name, shape in layout.shapes.items():
        expected = stored[name if name == "lm_head.weight" else prefix + name]
        assert tuple(expected.shape) == shape
        assert torch.equal(checkpoint.tensor(name), expected)


def test_schema_of_a_dense_target() -> None:
    assert target_schema(target_geometry()) == {
        "embed_tokens.weight": (12, 8),
        "norm.weight": (8,),
        "lm_head.weight": (12, 8),
        "layers.0.input_layernorm.weight": (8,),
        "layers.0.post_attention_layernorm.weight": (8,),
        "layers.0.linear_attn.in_proj_qkv.weight": (16, 8),
        "layers.0.linear_attn.in_proj_z.weight": (8, 8),
        "layers.0.linear_attn.in_proj_b.weight": (2, 8),
        "layers.0.linear_attn.in_proj_a.weight": (2, 8),
        "layers.0.linear_attn.conv1d.weight": (16, 1, 4),
        "layers.0.linear_attn.A_log": (2,),
        "layers.0.linear_attn.dt_bias": (2,),
        "layers.0.linear_attn.norm.weight": (4,),
        "layers.0.linear_attn.out_proj.weight": (8, 8),
        "layers.0.mlp.gate_proj.weight": (6, 8),
        "layers.0.mlp.up_proj.weight": (6, 8),
        "layers.0.mlp.down_proj.weight": (8, 6),
        "layers.1.input_layernorm.weight": (8,),
        "layers.1.post_attention_layernorm.weight": (8,),
        "layers.1.self_attn.q_proj.weight": (16, 8),
        "layers.1.self_attn.k_proj.weight": (4, 8),
        "layers.1.self_attn.v_proj.weight": (4, 8),
        "layers.1.self_attn.o_proj.weight": (8, 8),
        "layers.1.self_attn.q_norm.weight": (4,),
        "layers.1.self_attn.k_norm.weight": (4,),
        "layers.1.mlp.gate_proj.weight": (6, 8),
        "layers.1.mlp.up_proj.weight": (6, 8),
        "layers.1.mlp.down_proj.weight": (8, 6),
    }


def test_schema_of_a_moe_layer() -> None:
    schema = target_schema(read_target_geometry(GOLDEN / "target_moe"))
    name = "layers.1.mlp."
    assert {key.removeprefix(name): schema[key] for key in schema if key.startswith(name)} == {
        "gate.weight": (8, 64),
        "experts.gate_up_proj": (8, 64, 64),
        "experts.down_proj": (8, 64, 32),
        "shared_expert_gate.weight": (1, 64),
        "shared_expert.gate_proj.weight": (32, 64),
        "shared_expert.up_proj.weight": (32, 64),
        "shared_expert.down_proj.weight": (64, 32),
    }


def test_a_tied_head_is_served_from_the_embedding(tmp_path: Path) -> None:
    geometry = target_geometry(tied_head=True)
    stored = stored_target(geometry)
    assert "lm_head.weight" not in stored
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, target_layout(geometry))
    assert checkpoint.resolve("lm_head.weight") == "embed_tokens.weight"
    assert "lm_head.weight" in checkpoint and "lm_head.weight" not in checkpoint.shapes
    head, embedding = (checkpoint.tensor(f"{name}.weight") for name in ("lm_head", "embed_tokens"))
    assert head.data_ptr() == embedding.data_ptr()

    save_file(stored | {"lm_head.weight": torch.zeros(12, 8)}, tmp_path / "model.safetensors")
    again = Checkpoint.open(tmp_path, target_layout(geometry))
    assert torch.equal(again.tensor("lm_head.weight"), stored["model.embed_tokens.weight"])


def test_vision_and_prediction_weights_are_ignored(tmp_path: Path) -> None:
    geometry = target_geometry(weight_prefix="model.language_model.")
    others = (
        "model.visual.blocks.0.attn.qkv.weight",
        "mtp.fc.weight",
        "model.mtp.norm.weight",
        "model.language_model.rotary_emb.inv_freq",
    )
    stored = stored_target(geometry) | {name: torch.zeros(2, dtype=torch.int64) for name in others}
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, target_layout(geometry))
    assert set(checkpoint.shapes) == set(target_schema(geometry))


def test_codebooks_are_accepted_with_and_without_weight(tmp_path: Path) -> None:
    geometry = read_draft_geometry(GOLDEN / "dflash2_g16")
    name = "candidate_selector.predecessor_codebook"
    stored = {key: torch.randn(shape) for key, shape in draft_schema(geometry).items()}
    codebook = stored.pop(name)
    save_file(stored | {f"{name}.weight": codebook}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, draft_layout(geometry))
    assert torch.equal(checkpoint.tensor(name), codebook)

    both = {name: codebook, f"{name}.weight": codebook.clone()}
    save_file(stored | both, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensorError, match=f"expected tensor '{name}' once"):
        Checkpoint.open(tmp_path, draft_layout(geometry))


@pytest.mark.parametrize("extra", ["embed_tokens.weight", "lm_head.weight", "mtp.fc.weight"])
def test_a_draft_brings_no_embedding_and_no_head(tmp_path: Path, extra: str) -> None:
    geometry = read_draft_geometry(GOLDEN / "dflash2_g16")
    stored = {key: torch.randn(shape) for key, shape in draft_schema(geometry).items()}
    save_file(stored | {extra: torch.zeros(160, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensorError, match=rf"got 1: {extra}"):
        Checkpoint.open(tmp_path, draft_layout(geometry))


def test_features_of_the_wrong_count_name_the_blocks(tmp_path: Path) -> None:
    geometry = read_draft_geometry(GOLDEN / "dflash2_g16")
    stored = {key: torch.randn(shape) for key, shape in draft_schema(geometry).items()}
    save_file(stored | {"fc.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(TensorShapeError) as caught:
        Checkpoint.open(tmp_path, draft_layout(geometry))
    assert_mentions(caught.value, "fc.weight", "[64, 192]", "3 target_layer_ids", "[64, 128]")


def test_sharded_tensors_come_from_their_shards(tmp_path: Path) -> None:
    save_shards(
        tmp_path, {f"part-{key}.safetensors": {key: value} for key, value in TENSORS.items()}
    )
    checkpoint = Checkpoint.open(tmp_path, LAYOUT)
    assert all(torch.equal(checkpoint.tensor(key), value) for key, value in TENSORS.items())


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, LAYOUT)
    first, again = checkpoint.tensor("a.weight"), checkpoint.tensor("a.weight")
    assert first.data_ptr() == again.data_ptr()
    ranges = [line.split(" ", 1) for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [span.split("-") for span, rest in ranges if str(tmp_path) in rest]
    assert any(int(low, 16) <= first.data_ptr() < int(high, 16) for low, high in mapped)
    del checkpoint, again
    assert torch.equal(first, TENSORS["a.weight"])


def test_an_unknown_name_is_missing(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path, LAYOUT)
    with pytest.raises(MissingTensorError, match=r"no tensor 'c\.weight'; there are a\.weight"):
        checkpoint.tensor("c.weight")


def test_missing_tensors_are_counted_and_listed(tmp_path: Path) -> None:
    geometry = target_geometry()
    stored = stored_target(geometry)
    gone = [name for name in stored if ".linear_attn." in name]
    kept = {name: value for name, value in stored.items() if name not in gone}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensorError) as caught:
        Checkpoint.open(tmp_path, target_layout(geometry))
    assert_mentions(
        caught.value,
        f"expected {len(stored)} tensors",
        "9 are missing",
        "layers.0.linear_attn.in_proj_qkv.weight",
        "and 4 more",
    )


def test_another_prefix_is_reported_with_both_sides(tmp_path: Path) -> None:
    geometry = target_geometry()
    save_file(stored_target(geometry), tmp_path / "model.safetensors")
    nested = target_geometry(weight_prefix="model.language_model.")
    with pytest.raises(MissingTensorError) as caught:
        Checkpoint.open(tmp_path, target_layout(nested))
    assert_mentions(
        caught.value, "27 are missing", "beside unexpected", "model.embed_tokens.weight"
    )


def test_unexpected_tensors_are_counted_and_listed(tmp_path: Path) -> None:
    geometry = target_geometry()
    extra = {f"model.layers.{index}.bias": torch.zeros(1) for index in range(7)}
    save_file(stored_target(geometry) | extra, tmp_path / "model.safetensors")
    with pytest.raises(UnexpectedTensorError) as caught:
        Checkpoint.open(tmp_path, target_layout(geometry))
    assert_mentions(caught.value, str(tmp_path), "got 7", "model.layers.0.bias", "and 2 more")


def test_a_wrong_shape_names_file_tensor_and_origin(tmp_path: Path) -> None:
    save_file(TENSORS | {"a.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(TensorShapeError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(caught.value, "model.safetensors: a.weight", "[4, 2] (4 a_heads)", "got [2, 4]")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")],
)
def test_dtypes_that_are_no_weights(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    save_file(TENSORS | {"b.weight": torch.zeros(3).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(TensorDtypeError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(caught.value, "b.weight: expected dtype BF16 or F16 or F32", f"got {name}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_that_are_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(
        {key: value.to(dtype) for key, value in TENSORS.items()}, tmp_path / "model.safetensors"
    )
    assert Checkpoint.open(tmp_path, LAYOUT).tensor("a.weight").dtype == dtype


@pytest.mark.parametrize("keep", [0, 4, 30, -1])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(
        caught.value,
        f"{path}: expected a complete safetensors file",
        f"{path.stat().st_size} bytes",
    )


@pytest.mark.parametrize(
    "content",
    [
        b"no safetensors at all, but long enough for a header",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
    ],
)
def test_corrupt_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="expected a complete safetensors file"):
        Checkpoint.open(tmp_path, LAYOUT)


def test_a_directory_without_weights_lists_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"index\.json, got pytorch_model\.bin"):
        Checkpoint.open(tmp_path, LAYOUT)
    with pytest.raises(CheckpointError, match="got nothing"):
        Checkpoint.open(tmp_path / "absent", LAYOUT)


def test_a_shard_of_the_index_that_is_absent(tmp_path: Path) -> None:
    index = save_shards(tmp_path, {"one.safetensors": TENSORS})
    write_index(tmp_path, index | {"c.weight": "two.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(caught.value, "index.json", "expected 2 shards", "missing: two.safetensors")


def test_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    index = save_shards(tmp_path, {"one.safetensors": TENSORS})
    write_index(tmp_path, index | {"c.weight": "one.safetensors"})
    with pytest.raises(MissingTensorError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(caught.value, "one.safetensors", "1 are missing: c.weight")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_shards(
        tmp_path, {"one.safetensors": TENSORS, "two.safetensors": {"b.weight": torch.zeros(3)}}
    )
    with pytest.raises(UnexpectedTensorError) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert_mentions(caught.value, "one.safetensors", "'b.weight'", "it in two.safetensors")


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    index = save_shards(tmp_path, {"one.safetensors": TENSORS})
    del index["b.weight"]
    write_index(tmp_path, index)
    with pytest.raises(UnexpectedTensorError, match=r"'b\.weight'; the index has no such tensor"):
        Checkpoint.open(tmp_path, LAYOUT)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("{", "expected a JSON index"),
        ("[]", "weight_map: expected an object"),
        ('{"weight_map": {}}', "weight_map: expected an object"),
        ('{"weight_map": {"a.weight": 3}}', "a.weight: expected a file name"),
        ('{"weight_map": {"a.weight": "../one.safetensors"}}', "a.weight: expected a file name"),
        ('{"weight_map": {"a.weight": ""}}', "a.weight: expected a file name"),
        ('{"weight_map": {"a.weight": "%s"}}' % ("x" * 5000), "a.weight: expected a file name"),
        ("[" * 200_000, "expected a JSON index"),
    ],
)
def test_broken_indexes(tmp_path: Path, text: str, phrase: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=phrase) as caught:
        Checkpoint.open(tmp_path, LAYOUT)
    assert "model.safetensors.index.json" in str(caught.value)


def assert_mentions(error: CheckpointError, *phrases: str) -> None:
    message = str(error)
    assert all(phrase in message for phrase in phrases), message
    assert "\n" not in message
