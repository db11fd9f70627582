"""Model geometry: Hugging Face configs read into frozen values.

With `config_fields` the only reader of config files. A key that is absent or null counts as
missing. Fields of a draft's own stand in `dflash_config` first, then at the top level. Every error
names the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dflash_graph.config_fields import Fields, read_json
from dflash_graph.errors import PairError

FULL: Final = "full_attention"
LINEAR: Final = "linear_attention"
SLIDING: Final = "sliding_attention"

CONFIG_FILE: Final = "config.json"
GENERATION_FILE: Final = "generation_config.json"

_DRAFT_SCOPE: Final = "dflash_config"


@dataclass(frozen=True)
class _TargetFamily:
    """What an `architectures` entry stands for."""

    model_type: str
    text_architecture: str
    text_model_type: str
    weight_prefix: str


_DENSE = ("Qwen3_5ForCausalLM", "qwen3_5_text")
_MOE = ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text")
_NESTED_PREFIX: Final = "model.language_model."
_TARGETS: Final = {
    "Qwen3_5ForCausalLM": _TargetFamily(_DENSE[1], *_DENSE, "model."),
    "Qwen3_5MoeForCausalLM": _TargetFamily(_MOE[1], *_MOE, "model."),
    "Qwen3_5ForConditionalGeneration": _TargetFamily("qwen3_5", *_DENSE, _NESTED_PREFIX),
    "Qwen3_5MoeForConditionalGeneration": _TargetFamily("qwen3_5_moe", *_MOE, _NESTED_PREFIX),
}
_DRAFTS: Final[Mapping[str, Literal["dflash", "dflash2"]]] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
}


@dataclass(frozen=True)
class AttentionGeometry:
    """Softmax attention: heads, width D of a head, rotary channels and base."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class GdnGeometry:
    """Gated DeltaNet: key and value heads, widths Dk and Dv, taps of the causal convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v in this order."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True)
class DenseFfn:
    """Gated feed-forward of one width."""

    width: int


@dataclass(frozen=True)
class MoeFfn:
    """Routed experts and one shared expert."""

    experts: int
    expert_width: int
    experts_per_token: int
    shared_width: int


@dataclass(frozen=True)
class TargetGeometry:
    """A Qwen3.5 text model, also where the checkpoint is multimodal.

    `architecture` is the text architecture. `gdn` is None where no layer is linear. `dtype` is what
    the config says of the stored weights, None where it does not say.
    """

    architecture: str
    hidden: int
    vocab: int
    layer_types: tuple[str, ...]
    attention: AttentionGeometry
    gdn: GdnGeometry | None
    ffn: DenseFfn | MoeFfn
    norm_eps: float
    tied_head: bool
    mrope_section: tuple[int, int, int]
    weight_prefix: str
    dtype: str | None

    @property
    def layers(self) -> int:
        return len(self.layer_types)


@dataclass(frozen=True)
class ConvGeometry:
    """Grouped dynamic convolution of DFlash2: J channels a group, two taps."""

    group_size: int
    taps: int


@dataclass(frozen=True)
class SelectorGeometry:
    """Candidate selector of DFlash2: codebook width R, candidates a column C."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DraftGeometry:
    """A DFlash or DFlash2 draft; `conv` and `selector` are DFlash2's.

    `window` is S, None where no layer is local; `is_causal` is None where the config does not say;
    the three scales are None where they are not applied.
    """

    kind: Literal["dflash", "dflash2"]
    hidden: int
    vocab: int
    layer_types: tuple[str, ...]
    attention: AttentionGeometry
    ffn_width: int
    window: int | None
    norm_eps: float
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    is_causal: bool | None
    embedding_scale: float | None
    output_multiplier: float | None
    logit_softcap: float | None
    conv: ConvGeometry | None
    selector: SelectorGeometry | None
    dtype: str | None

    @property
    def layers(self) -> int:
        return len(self.layer_types)

    @property
    def feature_width(self) -> int:
        """Width of the concatenated target features: n * H."""
        return len(self.target_layer_ids) * self.hidden

    @property
    def conv_groups(self) -> int:
        """G = H / J; 0 without the convolution."""
        return self.hidden // self.conv.group_size if self.conv else 0


def layer_indices(layer_types: Sequence[str], kind: str) -> tuple[int, ...]:
    """Indices of the layers of one kind, ascending."""
    return tuple(index for index, other in enumerate(layer_types) if other == kind)


def read_target_geometry(directory: str | Path) -> TargetGeometry:
    """Geometry of the target in a checkpoint directory.

    Args:
        directory: holds `config.json`.

    Returns:
        The geometry of the text model, also of a multimodal checkpoint.

    Raises:
        ConfigError: the file is missing or broken, or a field is missing, ill-typed or impossible.
        UnsupportedModelError: the architecture or a feature is not one that this package computes.
    """
    path = Path(directory) / CONFIG_FILE
    return target_geometry_from_config(read_json(path), str(path))


def read_draft_geometry(directory: str | Path) -> DraftGeometry:
    """Geometry of the draft in a checkpoint directory; errors as of `read_target_geometry`."""
    path = Path(directory) / CONFIG_FILE
    return draft_geometry_from_config(read_json(path), str(path))


def read_generation_config(directory: str | Path) -> tuple[int, ...]:
    """Ids that end a sequence, from `generation_config.json`, else `config.json`, else none.

    Raises:
        ConfigError: a file is broken, `config.json` is missing, or the ids are ill-typed.
    """
    folder = Path(directory)
    places = [folder / GENERATION_FILE] if (folder / GENERATION_FILE).exists() else []
    for path in (*places, folder / CONFIG_FILE):
        config = read_json(path)
        nested = Fields(str(path), [("", config)]).section("text_config")
        fields = Fields(str(path), [("", config), ("text_config.", nested)])
        if isinstance(fields.get("eos_token_id"), list):
            return fields.integers("eos_token_id")
        if fields.get("eos_token_id") is not None:
            return (fields.integer("eos_token_id", minimum=0),)
    return ()


def target_geometry_from_config(config: Mapping[str, Any], where: str) -> TargetGeometry:
    """Geometry of a target from a parsed config; `where` names its file in errors."""
    top = Fields(where, [("", config)])
    architecture = top.architecture(_TARGETS)
    family = _TARGETS[architecture]
    top.model_type(family.model_type, architecture)
    top.only("quantization_config", {})
    fields = top
    if family.weight_prefix == _NESTED_PREFIX:
        if not top.section("text_config"):
            top.fail("text_config", f"the text model's fields (architecture {architecture})")
        fields = Fields(where, [("text_config.", top.section("text_config"))])
        if fields.get("model_type") is not None:
            fields.model_type(family.text_model_type, architecture)
    _refuse_variants(fields)
    fields.only("attn_output_gate", True)

    layers = fields.integer("num_hidden_layers")
    layer_types = fields.layer_types((LINEAR, FULL), layers)
    if layer_types is None:
        interval = fields.integer("full_attention_interval", default=4)
        layer_types = tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))
    head_dim = fields.integer("head_dim")
    theta, rope = fields.rope()
    rotary_dim = _rotary_dim(rope, head_dim)
    # A composite states tying once for the whole model; its top level speaks first.
    tying = top if top.get("tie_word_embeddings") is not None else fields
    return TargetGeometry(
        architecture=family.text_architecture,
        hidden=fields.integer("hidden_size"),
        vocab=fields.integer("vocab_size"),
        layer_types=layer_types,
        attention=_attention(fields, head_dim, rotary_dim, theta),
        gdn=_gdn(fields) if LINEAR in layer_types else None,
        ffn=_moe(fields) if family.text_architecture == _MOE[0] else _dense(fields),
        norm_eps=fields.number("rms_norm_eps", positive=True),
        tied_head=tying.flag("tie_word_embeddings", default=False),
        mrope_section=_mrope_section(rope, rotary_dim),
        weight_prefix=family.weight_prefix,
        dtype=fields.dtype() or top.dtype(),
    )


def draft_geometry_from_config(config: Mapping[str, Any], where: str) -> DraftGeometry:
    """Geometry of a draft from a parsed config; `where` names its file in errors.

    Where `layer_types` is missing it follows the Qwen3 config class: layers from
    `max_window_layers` (default 28) on are local if `use_sliding_window` is true (default false),
    all others full.
    """
    fields = Fields(where, [("", config)])
    architecture = fields.architecture(_DRAFTS)
    kind = _DRAFTS[architecture]
    fields.model_type("qwen3", architecture)
    _refuse_variants(fields)
    scope = fields.section(_DRAFT_SCOPE)
    own = Fields(where, [(f"{_DRAFT_SCOPE}.", scope), ("", config)])

    hidden = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim")
    theta, rope = fields.rope()
    rope.only("partial_rotary_factor", 1)
    layer_types = _draft_layer_types(fields)
    return DraftGeometry(
        kind=kind,
        hidden=hidden,
        vocab=fields.integer("vocab_size"),
        layer_types=layer_types,
        attention=_attention(fields, head_dim, _even(rope, "head_dim", head_dim), theta),
        ffn_width=fields.integer("intermediate_size"),
        window=fields.integer("sliding_window") if SLIDING in layer_types else None,
        norm_eps=fields.number("rms_norm_eps", positive=True),
        target_layer_ids=own.integers("target_layer_ids"),
        mask_token_id=own.integer("mask_token_id", minimum=0),
        block_size=own.integer("block_size", minimum=2),
        is_causal=own.optional("is_causal", own.flag),
        embedding_scale=own.optional("input_embedding_scale", own.number),
        output_multiplier=own.optional("output_multiplier", own.number),
        logit_softcap=own.optional("final_logit_softcapping", own.positive),
        conv=_conv(own, hidden) if kind == "dflash2" else None,
        selector=_selector(own) if kind == "dflash2" else None,
        dtype=fields.dtype(),
    )


def check_pair(target: TargetGeometry, draft: DraftGeometry) -> None:
    """Check that a draft fits its target.

    Raises:
        PairError: width, vocabulary, feature blocks or the mask token disagree.
    """
    for key, theirs, ours in (
        ("hidden_size", target.hidden, draft.hidden),
        ("vocab_size", target.vocab, draft.vocab),
    ):
        if theirs != ours:
            raise PairError(
                f"draft: {key}: expected {theirs} (the target's), got {ours}; "
                "a draft shares its target's embedding and head"
            )
    outside = [block for block in draft.target_layer_ids if not 0 <= block < target.layers]
    if outside:
        raise PairError(
            f"draft: target_layer_ids: expected blocks 0..{target.layers - 1} (the target has "
            f"{target.layers} layers), got {outside} in {list(draft.target_layer_ids)}"
        )
    if not 0 <= draft.mask_token_id < target.vocab:
        raise PairError(
            f"draft: mask_token_id: expected 0..{target.vocab - 1} (the target's vocab_size), "
            f"got {draft.mask_token_id}"
        )


def _attention(
    fields: Fields, head_dim: int, rotary_dim: int, rope_theta: float
) -> AttentionGeometry:
    q_heads, kv_heads = fields.multiple("num_attention_heads", "num_key_value_heads")
    return AttentionGeometry(q_heads, kv_heads, head_dim, rotary_dim, rope_theta)


def _gdn(fields: Fields) -> GdnGeometry:
    value_heads, key_heads = fields.multiple("linear_num_value_heads", "linear_num_key_heads")
    return GdnGeometry(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_taps=fields.integer("linear_conv_kernel_dim", minimum=2),
    )


def _dense(fields: Fields) -> DenseFfn:
    return DenseFfn(fields.integer("intermediate_size"))


def _moe(fields: Fields) -> MoeFfn:
    fields.only("mlp_only_layers", [])
    fields.only("norm_topk_prob", True)
    experts = fields.integer("num_experts")
    return MoeFfn(
        experts=experts,
        expert_width=fields.integer("moe_intermediate_size"),
        experts_per_token=fields.integer("num_experts_per_tok", maximum=experts),
        shared_width=fields.integer("shared_expert_intermediate_size"),
    )


def _conv(own: Fields, hidden: int) -> ConvGeometry:
    own.only("conv_kernel_size", 2)
    taps, group_size = own.integer("conv_kernel_size"), own.integer("conv_group_size")
    if hidden % group_size:
        own.fail("conv_group_size", f"a divisor of {hidden} (hidden_size)")
    return ConvGeometry(group_size, taps)


def _selector(own: Fields) -> SelectorGeometry:
    vocab = own.integer("vocab_size")
    return SelectorGeometry(
        own.integer("selector_rank"), own.integer("selector_top_k", maximum=vocab)
    )


def _refuse_variants(fields: Fields) -> None:
    fields.only("quantization_config", {})
    fields.only("attention_bias", False)
    fields.only("hidden_act", "silu")


def _draft_layer_types(fields: Fields) -> tuple[str, ...]:
    layers = fields.integer("num_hidden_layers")
    stated = fields.layer_types((SLIDING, FULL), layers)
    if stated is None:
        first_local = layers
        if fields.flag("use_sliding_window", default=False):
            first_local = fields.integer("max_window_layers", default=28, minimum=0)
        return tuple(SLIDING if index >= first_local else FULL for index in range(layers))
    if SLIDING in stated and not fields.flag("use_sliding_window", default=True):
        fields.fail("use_sliding_window", f"true (layer_types has {SLIDING})")
    return stated


def _rotary_dim(rope: Fields, head_dim: int) -> int:
    """Rotary channels of a target's head: a quarter of it unless the config says otherwise."""
    factor = rope.number("partial_rotary_factor", default=0.25, positive=True)
    channels = head_dim * factor
    if factor > 1 or channels != int(channels):
        rope.fail("partial_rotary_factor", f"a whole share of head_dim {head_dim}, at most 1")
    return _even(rope, "partial_rotary_factor", int(channels))


def _even(fields: Fields, key: str, channels: int) -> int:
    if channels < 2 or channels % 2:
        fields.fail(key, "an even number of rotary channels, at least 2", f"{channels} channels")
    return channels


def _mrope_section(rope: Fields, rotary_dim: int) -> tuple[int, int, int]:
    """Frequencies of each axis; where missing as even as can be, earlier axes first (11,11,10)."""
    rope.only("mrope_interleaved", True)
    pairs = rotary_dim // 2
    if rope.get("mrope_section") is None:
        return ((pairs + 2) // 3, (pairs + 1) // 3, pairs // 3)
    section = rope.integers("mrope_section", distinct=False)
    if len(section) != 3 or sum(section) != pairs:
        rope.fail("mrope_section", f"three axes with sum {pairs} (half of the rotary channels)")
    return section[0], section[1], section[2]
