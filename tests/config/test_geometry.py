"""Configs to geometry: what is read, and the error that each bad field gives."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_graph.errors import ConfigError, PairError, UnsupportedModelError
from dflash_graph.geometry import (
    FULL,
    LINEAR,
    SLIDING,
    AttentionGeometry,
    ConvGeometry,
    DenseFfn,
    GdnGeometry,
    MoeFfn,
    SelectorGeometry,
    check_pair,
    draft_geometry_from_config,
    layer_indices,
    read_draft_geometry,
    read_generation_config,
    read_target_geometry,
    target_geometry_from_config,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DELETED = object()

TARGET: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MOE: dict[str, Any] = {key: TARGET[key] for key in TARGET if key != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
DRAFT: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "rope_scaling": None,
    "layer_types": [SLIDING, FULL],
    "use_sliding_window": True,
    "sliding_window": 16,
    "block_size": 8,
    "dflash_config": {
        "target_layer_ids": [0, 2],
        "mask_token_id": 95,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 6,
    },
}


def changed(config: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of `config` with the key at a dotted path set, or deleted."""
    config = copy.deepcopy(config)
    *parents, key = path.split(".")
    scope = config
    for parent in parents:
        scope = scope[parent]
    if value is DELETED:
        del scope[key]
    else:
        scope[key] = value
    return config


def composite(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
    }


def write(directory: Path, name: str, value: object) -> Path:
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return directory


def test_dense_target() -> None:
    geometry = target_geometry_from_config(TARGET, "config.json")
    assert geometry.architecture == "Qwen3_5ForCausalLM"
    assert (geometry.hidden, geometry.vocab, geometry.layers) == (32, 96, 4)
    assert geometry.attention == AttentionGeometry(4, 2, 16, 8, 1e7)
    assert (geometry.attention.q_width, geometry.attention.kv_width) == (64, 32)
    assert geometry.gdn == GdnGeometry(2, 4, 8, 16, 4)
    assert (geometry.gdn.key_width, geometry.gdn.value_width) == (16, 64)
    assert geometry.gdn.conv_channels == 2 * 16 + 64
    assert geometry.ffn == DenseFfn(48)
    assert geometry.mrope_section == (2, 1, 1)
    assert (geometry.weight_prefix, geometry.tied_head) == ("model.", False)
    assert geometry.dtype == "bfloat16"
    assert layer_indices(geometry.layer_types, LINEAR) == (0, 1, 2)


def test_moe_target() -> None:
    geometry = target_geometry_from_config(MOE, "config.json")
    assert geometry.architecture == "Qwen3_5MoeForCausalLM"
    assert geometry.ffn == MoeFfn(8, 24, 2, 40)


def test_a_composite_config_differs_in_its_prefix_only() -> None:
    geometry = target_geometry_from_config(composite(TARGET), "config.json")
    plain = target_geometry_from_config(TARGET, "config.json")
    assert geometry == replace(plain, weight_prefix="model.language_model.")
    moe = composite(MOE) | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
    }
    assert target_geometry_from_config(moe, "config.json").ffn == MoeFfn(8, 24, 2, 40)


def test_the_top_level_of_a_composite_decides_tying() -> None:
    config = changed(composite(TARGET), "text_config.tie_word_embeddings", True)
    assert target_geometry_from_config(config, "c").tied_head
    assert not target_geometry_from_config(config | {"tie_word_embeddings": False}, "c").tied_head


def test_missing_target_fields_have_the_documented_defaults() -> None:
    config = changed(TARGET, "layer_types", DELETED) | {"num_hidden_layers": 9}
    config["rope_parameters"] = {"rope_theta": 1e4}
    config["head_dim"] = 64
    geometry = target_geometry_from_config(config, "config.json")
    assert layer_indices(geometry.layer_types, FULL) == (3, 7)
    assert geometry.attention.rotary_dim == 16
    assert geometry.mrope_section == (3, 3, 2)
    geometry = target_geometry_from_config(config | {"full_attention_interval": 3}, "config.json")
    assert layer_indices(geometry.layer_types, FULL) == (2, 5, 8)
    large = target_geometry_from_config(config | {"head_dim": 256}, "config.json")
    assert large.mrope_section == (11, 11, 10)


def test_older_rope_keys_and_a_top_level_rotary_factor() -> None:
    config = changed(TARGET, "rope_parameters", DELETED)
    config |= {"rope_theta": 5000, "partial_rotary_factor": 0.25, "rope_scaling": None}
    attention = target_geometry_from_config(config, "config.json").attention
    assert (attention.rope_theta, attention.rotary_dim) == (5000.0, 4)


def test_a_target_without_linear_layers_needs_no_gdn_fields() -> None:
    config = {key: value for key, value in TARGET.items() if not key.startswith("linear_")}
    geometry = target_geometry_from_config(config | {"layer_types": [FULL] * 4}, "config.json")
    assert geometry.gdn is None


def test_dflash2_draft() -> None:
    geometry = draft_geometry_from_config(DRAFT, "config.json")
    assert geometry.kind == "dflash2"
    assert (geometry.hidden, geometry.vocab, geometry.layers, geometry.ffn_width) == (32, 96, 2, 64)
    assert geometry.attention == AttentionGeometry(4, 2, 8, 8, 10000.0)
    assert (geometry.window, geometry.norm_eps) == (16, 1e-5)
    assert (geometry.target_layer_ids, geometry.feature_width) == ((0, 2), 64)
    assert (geometry.mask_token_id, geometry.block_size) == (95, 8)
    assert geometry.conv == ConvGeometry(group_size=8, taps=2) and geometry.conv_groups == 4
    assert geometry.selector == SelectorGeometry(rank=4, top_k=6)
    assert geometry.is_causal is geometry.dtype is None
    assert geometry.embedding_scale is geometry.output_multiplier is geometry.logit_softcap is None


def test_dflash_draft_has_no_convolution_and_no_selector() -> None:
    config = DRAFT | {"architectures": ["DFlashDraftModel"]}
    geometry = draft_geometry_from_config(config, "config.json")
    assert geometry.kind == "dflash"
    assert geometry.conv is geometry.selector is None
    assert geometry.conv_groups == 0


def test_draft_fields_stand_in_dflash_config_first_then_at_the_top() -> None:
    top = changed(DRAFT, "dflash_config", DELETED) | DRAFT["dflash_config"]
    assert draft_geometry_from_config(top, "c") == draft_geometry_from_config(DRAFT, "c")
    both = changed(DRAFT, "dflash_config.block_size", 16)
    assert draft_geometry_from_config(both, "c").block_size == 16


def test_optional_draft_fields() -> None:
    config = DRAFT | {
        "is_causal": True,
        "input_embedding_scale": 2,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
        "torch_dtype": "float32",
    }
    geometry = draft_geometry_from_config(config, "config.json")
    assert geometry.is_causal is True and geometry.dtype == "float32"
    assert geometry.embedding_scale == 2.0
    assert (geometry.output_multiplier, geometry.logit_softcap) == (0.5, 30.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (FULL, FULL)),
        ({"use_sliding_window": True}, (FULL, FULL)),
        ({"use_sliding_window": True, "max_window_layers": 1}, (FULL, SLIDING)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (SLIDING, SLIDING)),
        ({"use_sliding_window": False, "max_window_layers": 0}, (FULL, FULL)),
    ],
)
def test_missing_draft_layer_types_follow_the_window_keys(
    given: dict[str, Any], expected: tuple[str, ...]
) -> None:
    config = {
        key: value
        for key, value in DRAFT.items()
        if key not in ("layer_types", "use_sliding_window")
    }
    geometry = draft_geometry_from_config(config | given, "config.json")
    assert geometry.layer_types == expected
    assert geometry.window == (16 if SLIDING in expected else None)


@pytest.mark.parametrize(
    ("path", "value", "kind", "phrases"),
    [
        ("architectures", DELETED, UnsupportedModelError, ["Qwen3_5ForCausalLM", "got nothing"]),
        ("architectures", ["Llama"], UnsupportedModelError, ["Qwen3_5MoeForCausalLM", "Llama"]),
        ("architectures", "Qwen3_5ForCausalLM", UnsupportedModelError, ["a list of one of"]),
        ("architectures", [], UnsupportedModelError, ["got []"]),
        ("architectures", [{}], UnsupportedModelError, ["got [{}]"]),
        ("model_type", DELETED, UnsupportedModelError, ["'qwen3_5_text'", "got nothing"]),
        ("model_type", "qwen3", UnsupportedModelError, ["'qwen3_5_text'", '"qwen3"']),
        ("hidden_size", DELETED, ConfigError, ["an integer 1..", "got nothing"]),
        ("hidden_size", None, ConfigError, ["got nothing"]),
        ("hidden_size", "32", ConfigError, ['got "32"']),
        ("hidden_size", True, ConfigError, ["got true"]),
        ("hidden_size", 32.0, ConfigError, ["got 32.0"]),
        ("vocab_size", 0, ConfigError, ["got 0"]),
        ("vocab_size", 2**31, ConfigError, ["1..2147483647"]),
        ("num_hidden_layers", -4, ConfigError, ["got -4"]),
        ("intermediate_size", DELETED, ConfigError, ["got nothing"]),
        ("num_attention_heads", 3, ConfigError, ["a multiple of 2 (num_key_value_heads)"]),
        ("linear_num_value_heads", 3, ConfigError, ["a multiple of 2 (linear_num_key_heads)"]),
        ("linear_conv_kernel_dim", 1, ConfigError, ["an integer 2.."]),
        ("linear_key_head_dim", DELETED, ConfigError, ["got nothing"]),
        ("rms_norm_eps", 0, ConfigError, ["a finite number > 0"]),
        ("rms_norm_eps", float("nan"), ConfigError, ["a finite number > 0", "NaN"]),
        ("rms_norm_eps", 10**400, ConfigError, ["a finite number > 0"]),
        ("rms_norm_eps", False, ConfigError, ["a finite number > 0", "got false"]),
        ("layer_types", [FULL] * 3, ConfigError, ["4 kinds (num_hidden_layers)", "got 3 entries"]),
        ("layer_types", [FULL] * 3 + [SLIDING], ConfigError, [SLIDING, "at index 3"]),
        ("layer_types", FULL, ConfigError, ["a list of 4 kinds"]),
        ("tie_word_embeddings", 1, ConfigError, ["true or false", "got 1"]),
        ("hidden_act", "gelu", UnsupportedModelError, ['expected "silu"', 'got "gelu"']),
        ("attention_bias", True, UnsupportedModelError, ["expected false", "got true"]),
        ("attn_output_gate", False, UnsupportedModelError, ["expected true"]),
        ("quantization_config", {"bits": 4}, UnsupportedModelError, ['{"bits": 4}']),
        ("dtype", "float8_e4m3fn", UnsupportedModelError, ['"bfloat16" or "float16"']),
        ("rope_parameters", 5, ConfigError, ["an object", "got 5"]),
        ("rope_parameters.rope_type", "yarn", UnsupportedModelError, ['"default"', '"yarn"']),
        ("rope_parameters.rope_type", "proportional", UnsupportedModelError, ["proportional"]),
        ("rope_parameters.rope_theta", DELETED, ConfigError, ["got nothing"]),
        ("rope_parameters.rope_theta", -1.0, ConfigError, ["a finite number > 0"]),
        ("rope_parameters.partial_rotary_factor", 1.5, ConfigError, ["head_dim 16"]),
        ("rope_parameters.partial_rotary_factor", 0.3, ConfigError, ["a whole share"]),
        ("rope_parameters.partial_rotary_factor", 0.0625, ConfigError, ["an even number"]),
        ("rope_parameters.mrope_section", [2, 2, 1], ConfigError, ["sum 4"]),
        ("rope_parameters.mrope_section", [2, 2], ConfigError, ["three axes"]),
        ("rope_parameters.mrope_interleaved", False, UnsupportedModelError, ["expected true"]),
    ],
)
def test_bad_target_fields(
    path: str, value: object, kind: type[ConfigError], phrases: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        target_geometry_from_config(changed(TARGET, path, value), "dir/config.json")
    assert_names(caught.value, kind, "dir/config.json", path.rpartition(".")[2], phrases)


@pytest.mark.parametrize(
    ("path", "value", "kind", "phrases"),
    [
        ("num_experts", DELETED, ConfigError, ["got nothing"]),
        ("num_experts_per_tok", 9, ConfigError, ["an integer 1..8", "got 9"]),
        ("moe_intermediate_size", 0, ConfigError, ["got 0"]),
        ("shared_expert_intermediate_size", DELETED, ConfigError, ["got nothing"]),
        ("norm_topk_prob", False, UnsupportedModelError, ["expected true"]),
        ("mlp_only_layers", [1], UnsupportedModelError, ["expected []"]),
    ],
)
def test_bad_moe_fields(
    path: str, value: object, kind: type[ConfigError], phrases: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        target_geometry_from_config(changed(MOE, path, value), "dir/config.json")
    assert_names(caught.value, kind, "dir/config.json", path, phrases)


@pytest.mark.parametrize(
    ("path", "value", "kind", "phrases"),
    [
        ("text_config", DELETED, ConfigError, ["the text model's fields"]),
        ("text_config", [1], ConfigError, ["an object"]),
        ("text_config.model_type", "llama", UnsupportedModelError, ["text_config.model_type"]),
        ("text_config.hidden_size", DELETED, ConfigError, ["text_config.hidden_size"]),
        ("model_type", "qwen3_5_text", UnsupportedModelError, ["'qwen3_5'"]),
    ],
)
def test_bad_composite_fields(
    path: str, value: object, kind: type[ConfigError], phrases: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        target_geometry_from_config(changed(composite(TARGET), path, value), "dir/config.json")
    assert_names(caught.value, kind, "dir/config.json", path, phrases)


@pytest.mark.parametrize(
    ("path", "value", "kind", "phrases"),
    [
        ("architectures", ["Qwen3ForCausalLM"], UnsupportedModelError, ["DFlash2DraftModel"]),
        ("model_type", "llama", UnsupportedModelError, ["'qwen3'"]),
        ("dflash_config", "x", ConfigError, ["an object"]),
        ("dflash_config.target_layer_ids", DELETED, ConfigError, ["different integers"]),
        ("dflash_config.target_layer_ids", [], ConfigError, ["different integers", "got []"]),
        ("dflash_config.target_layer_ids", [0, -1], ConfigError, ["integers >= 0"]),
        ("dflash_config.target_layer_ids", [0, True], ConfigError, ["got [0, true]"]),
        ("dflash_config.target_layer_ids", [2, 0, 2], ConfigError, ["repeated"]),
        ("dflash_config.mask_token_id", -1, ConfigError, ["dflash_config.mask_token_id"]),
        ("dflash_config.mask_token_id", DELETED, ConfigError, ["got nothing"]),
        ("block_size", 1, ConfigError, ["an integer 2.."]),
        ("dflash_config.conv_kernel_size", 3, UnsupportedModelError, ["expected 2", "got 3"]),
        ("dflash_config.conv_kernel_size", DELETED, ConfigError, ["got nothing"]),
        ("dflash_config.conv_group_size", 12, ConfigError, ["a divisor of 32 (hidden_size)"]),
        ("dflash_config.selector_rank", 0, ConfigError, ["got 0"]),
        ("dflash_config.selector_top_k", 97, ConfigError, ["an integer 1..96"]),
        ("is_causal", "no", ConfigError, ["true or false"]),
        ("input_embedding_scale", "2", ConfigError, ["a finite number"]),
        ("output_multiplier", float("inf"), ConfigError, ["a finite number", "Infinity"]),
        ("final_logit_softcapping", 0, ConfigError, ["a finite number > 0"]),
        ("layer_types", [SLIDING, LINEAR], ConfigError, [LINEAR, "at index 1"]),
        ("layer_types", [SLIDING], ConfigError, ["2 kinds (num_hidden_layers)"]),
        ("use_sliding_window", False, ConfigError, ["expected true", "sliding_attention"]),
        ("sliding_window", None, ConfigError, ["an integer 1..", "got nothing"]),
        ("num_attention_heads", 5, ConfigError, ["a multiple of 2 (num_key_value_heads)"]),
        ("head_dim", 7, ConfigError, ["an even number of rotary channels"]),
        ("rope_theta", DELETED, ConfigError, ["a finite number > 0", "got nothing"]),
        ("hidden_act", "gelu", UnsupportedModelError, ['"gelu"']),
        ("attention_bias", True, UnsupportedModelError, ["expected false"]),
        ("partial_rotary_factor", 0.5, UnsupportedModelError, ["expected 1"]),
    ],
)
def test_bad_draft_fields(
    path: str, value: object, kind: type[ConfigError], phrases: list[str]
) -> None:
    config = changed(DRAFT, path, value)
    with pytest.raises(ConfigError) as caught:
        draft_geometry_from_config(config, "dir/config.json")
    assert_names(caught.value, kind, "dir/config.json", path.rpartition(".")[2], phrases)


@pytest.mark.parametrize("parameters", [None, {"rope_type": "default", "rope_theta": 1e4}])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_scaled_rope_is_refused_in_older_keys_too(
    key: str, parameters: dict[str, Any] | None
) -> None:
    config = DRAFT | {"rope_scaling": {key: "yarn"}, "rope_parameters": parameters}
    with pytest.raises(ConfigError) as caught:
        draft_geometry_from_config(config, "dir/config.json")
    phrases = ['expected "default"', 'got "yarn"']
    assert_names(
        caught.value, UnsupportedModelError, "dir/config.json", f"rope_scaling.{key}", phrases
    )


def test_a_pair_that_fits() -> None:
    target = target_geometry_from_config(TARGET, "config.json")
    check_pair(target, draft_geometry_from_config(DRAFT, "config.json"))
    last = changed(DRAFT, "dflash_config.target_layer_ids", [3])
    check_pair(target, draft_geometry_from_config(last, "config.json"))


@pytest.mark.parametrize(
    ("path", "value", "phrases"),
    [
        ("hidden_size", 64, ["hidden_size", "expected 32", "got 64"]),
        ("vocab_size", 128, ["vocab_size", "expected 96", "got 128"]),
        ("dflash_config.target_layer_ids", [1, 4], ["target_layer_ids", "0..3", "[4]"]),
        ("dflash_config.mask_token_id", 96, ["mask_token_id", "0..95", "got 96"]),
    ],
)
def test_a_pair_that_does_not_fit(path: str, value: object, phrases: list[str]) -> None:
    target = target_geometry_from_config(TARGET, "config.json")
    draft = draft_geometry_from_config(changed(DRAFT, path, value), "config.json")
    with pytest.raises(PairError) as caught:
        check_pair(target, draft)
    assert all(phrase in str(caught.value) for phrase in phrases)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [("{", "broken text"), ("[]", "a JSON object"), ("7", "got 7"), ("\udcff", "broken text")],
)
def test_broken_config_files(tmp_path: Path, text: str, phrase: str) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    for read in (read_target_geometry, read_draft_geometry, read_generation_config):
        with pytest.raises(ConfigError, match=phrase) as caught:
            read(tmp_path)
        assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_config_file(tmp_path: Path) -> None:
    for read in (read_target_geometry, read_draft_geometry, read_generation_config):
        with pytest.raises(ConfigError, match="No such file") as caught:
            read(tmp_path / "absent")
        assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 3}, {"eos_token_id": 9}, (3,)),
        ({"eos_token_id": [3, 5]}, {}, (3, 5)),
        ({}, {"eos_token_id": 9}, (9,)),
        (None, {"eos_token_id": [9, 0]}, (9, 0)),
        (None, {"text_config": {"eos_token_id": 4}}, (4,)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_of_sequence_ids(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    write(tmp_path, "config.json", config)
    if generation is not None:
        write(tmp_path, "generation_config.json", generation)
    assert read_generation_config(tmp_path) == expected


@pytest.mark.parametrize("value", [True, -1, "3", [1, "x"], [2, 2], {}])
def test_ill_typed_end_of_sequence_ids(tmp_path: Path, value: object) -> None:
    write(tmp_path, "config.json", {})
    write(tmp_path, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(ConfigError) as caught:
        read_generation_config(tmp_path)
    assert_names(caught.value, ConfigError, "generation_config.json", "eos_token_id", [])


def test_golden_configs() -> None:
    dense = read_target_geometry(GOLDEN / "target_dense_2x")
    nested = read_target_geometry(GOLDEN / "target_dense_2x_composite")
    assert nested == replace(dense, weight_prefix="model.language_model.")
    assert dense.attention == AttentionGeometry(4, 2, 32, 8, 10000.0)
    assert layer_indices(dense.layer_types, FULL) == (3, 7)
    assert read_target_geometry(GOLDEN / "target_moe").ffn == MoeFfn(8, 32, 2, 32)
    draft = read_draft_geometry(GOLDEN / "dflash2_g16")
    assert (draft.window, draft.target_layer_ids, draft.is_causal) == (16, (1, 3, 5), False)
    assert draft.selector == SelectorGeometry(rank=8, top_k=4)
    check_pair(dense, draft)


def assert_names(
    error: ConfigError, kind: type[ConfigError], file: str, key: str, phrases: list[str]
) -> None:
    message = str(error)
    assert type(error) is kind
    assert file in message and f"{key}: expected " in message
    assert all(phrase in message for phrase in phrases), message
    assert "\n" not in message
