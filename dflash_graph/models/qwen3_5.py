"""The target: Qwen3.5 hybrids of Gated DeltaNet and gated full attention (spec section 2).

One declaration serves a round's verify, plain decoding (W = 1) and a prefill chunk. They differ in
how a Gated DeltaNet layer treats its state: verify keeps records and writes nothing, prefill scans
the state forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash_graph.geometry import DenseFfn, GdnGeometry, TargetGeometry, layer_indices
from dflash_graph.graph import GraphBuilder, Value
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.tensor import TensorSpec


@dataclass(frozen=True)
class TargetInputs:
    """Frame fields a target pass reads.

    Args:
        ids: `[B, W]` tokens.
        positions: `[3, B, W]` rotary positions (temporal, height, width).
        slots: `[B]` state slot of each request.
        page_table: `[B, M]` page of each 64 positions.
        start: `[B]` position of column 0.
        live: `[B]` live columns.
        embeddings: `[B, W, H]` float32 that take the place of token embeddings, or None.
        replaced: `[B, W]` 1 where they do.
    """

    ids: Value
    positions: Value
    slots: Value
    page_table: Value
    start: Value
    live: Value
    embeddings: Value | None = None
    replaced: Value | None = None


@dataclass(frozen=True)
class Records:
    """What verify keeps of one Gated DeltaNet layer, so that Fold can replay its columns."""

    columns: Value  # [B, W, C] before convolution
    k: Value  # [B, W, Hk, Dk] before normalization
    v: Value  # [B, W, Hv, Dv]
    beta: Value  # [B, W, Hv]
    decay: Value  # [B, W, Hv]

    def values(self) -> tuple[Value, ...]:
        return (self.columns, self.k, self.v, self.beta, self.decay)


@dataclass(frozen=True)
class TargetOutputs:
    """Result of a pass: final hidden, block outputs by layer index, records by layer index."""

    hidden: Value  # [B, W, H] after the final norm
    blocks: dict[int, Value] = field(default_factory=dict)  # [B, W, H] each
    records: dict[int, Records] = field(default_factory=dict)


def embedding_weight(g: GraphBuilder, target: TargetGeometry) -> Value:
    """The token embedding `[V, H]`, which a draft borrows."""
    return g.weight(
        "target.embed_tokens", ("target/embed_tokens.weight",), (target.vocab, target.hidden)
    )


def head_weight(g: GraphBuilder, target: TargetGeometry) -> Value:
    """The output head `[V, H]`, which a draft borrows; the embedding itself where they are tied."""
    if target.tied_head:
        return embedding_weight(g, target)
    return g.weight("target.lm_head", ("target/lm_head.weight",), (target.vocab, target.hidden))


def gdn_state(g: GraphBuilder, target: TargetGeometry, layer: int) -> tuple[Value, Value]:
    """Recurrent state (float32 `[slots, Hv, Dv, Dk]`) and the last pre-convolution columns of a
    layer.
    """
    gdn = _gdn(target)
    return (
        g.state(
            f"target.layers.{layer}.gdn_state",
            ("slots", gdn.value_heads, gdn.value_dim, gdn.key_dim),
            "float32",
        ),
        g.state(
            f"target.layers.{layer}.conv_history", ("slots", gdn.conv_taps - 1, gdn.conv_channels)
        ),
    )


def kv_pages(g: GraphBuilder, target: TargetGeometry, layer: int) -> tuple[Value, Value]:
    """Paged keys and values of a full-attention layer."""
    shape = ("pages", target.attention.kv_heads, PAGE_SIZE, target.attention.head_dim)
    return (
        g.state(f"target.layers.{layer}.k_pages", shape),
        g.state(f"target.layers.{layer}.v_pages", shape),
    )


def continuation_hidden(g: GraphBuilder, target: TargetGeometry) -> Value:
    """Final hidden of each request's last processed token."""
    return g.state("target.continuation_hidden", ("slots", target.hidden))


def declare_state(g: GraphBuilder, target: TargetGeometry) -> None:
    """Declare every state of the target; what pools are planned from."""
    for layer, kind in enumerate(target.layer_types):
        if kind == "full_attention":
            kv_pages(g, target, layer)
        else:
            gdn_state(g, target, layer)
    continuation_hidden(g, target)


def record_specs(
    target: TargetGeometry, dtype: str, batch: int, columns: int
) -> dict[str, TensorSpec]:
    """Specs of the records that one round of all layers keeps, by value kind and layer."""
    specs: dict[str, TensorSpec] = {}
    for layer in layer_indices(target.layer_types, "linear_attention"):
        gdn = _gdn(target)
        lead = (batch, columns)
        specs[f"layers.{layer}.columns"] = TensorSpec((*lead, gdn.conv_channels), dtype)
        specs[f"layers.{layer}.k"] = TensorSpec((*lead, gdn.key_heads, gdn.key_dim), dtype)
        specs[f"layers.{layer}.v"] = TensorSpec((*lead, gdn.value_heads, gdn.value_dim), dtype)
        specs[f"layers.{layer}.beta"] = TensorSpec((*lead, gdn.value_heads), "float32")
        specs[f"layers.{layer}.decay"] = TensorSpec((*lead, gdn.value_heads), "float32")
    return specs


def declare_pass(
    g: GraphBuilder,
    target: TargetGeometry,
    inputs: TargetInputs,
    *,
    blocks: tuple[int, ...] = (),
    prefill: bool = False,
) -> TargetOutputs:
    """Declare one forward pass of the target.

    Args:
        blocks: layers whose complete residual output is asked for (features).
        prefill: commit as it goes (state scanned forward, products over all rows at once) instead
            of keeping records for a later commit (row-invariant).
    """
    attention = target.attention
    x = g.call(
        "embedding", "embedding", ids=inputs.ids, table=embedding_weight(g, target), scale=1.0
    )
    if inputs.embeddings is not None:
        given = {"given": inputs.embeddings, "replaced": inputs.replaced}
        x = g.call("replace_embeddings", x=x, **given)
    rotary: tuple[Value, Value] | None = None
    if "full_attention" in target.layer_types:
        rotary = g.call(
            "rotary_table",
            "rotary",
            positions=inputs.positions,
            rotary_half=attention.rotary_dim // 2,
            theta=attention.rope_theta,
            sections=target.mrope_section,
        )
    kept: dict[int, Value] = {}
    records: dict[int, Records] = {}
    for layer, kind in enumerate(target.layer_types):
        with g.region(f"layer.{layer}"):
            with g.region("mixer"):
                n = _norm(g, target, x, f"layers.{layer}.input_layernorm", "norm")
                if kind == "full_attention":
                    y = _gated_attention(g, target, layer, n, inputs, rotary, tiled=not prefill)
                else:
                    y, record = _gated_delta_net(g, target, layer, n, inputs, prefill=prefill)
                    if record is not None:
                        records[layer] = record
                x = g.call("residual_add", "residual", x=x, y=y)
            with g.region("ffn"):
                n = _norm(g, target, x, f"layers.{layer}.post_attention_layernorm", "norm")
                y = _feed_forward(g, target, layer, n, tiled=not prefill)
                x = g.call("residual_add", "residual", x=x, y=y)
        if layer in blocks:
            kept[layer] = x
    return TargetOutputs(_norm(g, target, x, "norm", "final_norm"), kept, records)


def _gdn(target: TargetGeometry) -> GdnGeometry:
    assert target.gdn is not None, "a linear-attention layer needs Gated DeltaNet geometry"
    return target.gdn


def _norm(g: GraphBuilder, target: TargetGeometry, x: Value, role: str, label: str) -> Value:
    weight = g.weight(f"target.{role}", (f"target/{role}.weight",), (target.hidden,))
    value: Value = g.call("rms_norm", label, x=x, weight=weight, eps=target.norm_eps, offset=True)
    return value


def _project(
    g: GraphBuilder,
    x: Value,
    module: str,
    names: tuple[str, ...],
    shape: tuple[int, int],
    *,
    tiled: bool,
) -> Value:
    """A product with the stacked weights `names` of a module; the node is called after them."""
    label = "_".join(name.removesuffix("_proj").removeprefix("in_proj_") for name in names)
    weight = g.weight(
        f"target.{module}.{label}", tuple(f"target/{module}.{n}.weight" for n in names), shape
    )
    value: Value = g.call("linear", label, x=x, weight=weight, tiled=tiled)
    return value


def _gated_attention(
    g: GraphBuilder,
    target: TargetGeometry,
    layer: int,
    n: Value,
    inputs: TargetInputs,
    rotary: tuple[Value, Value] | None,
    *,
    tiled: bool,
) -> Value:
    assert rotary is not None, "a layer with full attention turns its heads"
    a, module = target.attention, f"layers.{layer}.self_attn"
    packed = (2 * a.q_heads + 2 * a.kv_heads) * a.head_dim
    qkv = _project(
        g, n, module, ("q_proj", "k_proj", "v_proj"), (packed, target.hidden), tiled=tiled
    )
    q, k, v = g.call(
        "head_norm_rope",
        qkv=qkv,
        q_norm=g.weight(
            f"target.{module}.q_norm", (f"target/{module}.q_norm.weight",), (a.head_dim,)
        ),
        k_norm=g.weight(
            f"target.{module}.k_norm", (f"target/{module}.k_norm.weight",), (a.head_dim,)
        ),
        cos=rotary[0],
        sin=rotary[1],
        query_parts=2,
        q_heads=a.q_heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        rotary_half=a.rotary_dim // 2,
        eps=target.norm_eps,
        offset=True,
    )
    k_pages, v_pages = kv_pages(g, target, layer)
    place = {"page_table": inputs.page_table, "start": inputs.start, "live": inputs.live}
    g.call("append_kv", k=k, v=v, k_pages=k_pages, v_pages=v_pages, **place)
    o = g.call("paged_attention", "attention", q=q, k_pages=k_pages, v_pages=v_pages, **place)
    y = g.call(
        "attention_gate",
        "gate",
        o=o,
        qkv=qkv,
        q_heads=a.q_heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
    )
    return _project(g, y, module, ("o_proj",), (target.hidden, a.q_width), tiled=tiled)


def _gated_delta_net(
    g: GraphBuilder,
    target: TargetGeometry,
    layer: int,
    n: Value,
    inputs: TargetInputs,
    *,
    prefill: bool,
) -> tuple[Value, Records | None]:
    gdn, module, tiled = _gdn(target), f"layers.{layer}.linear_attn", not prefill
    hidden, heads = target.hidden, gdn.value_heads
    columns = _project(g, n, module, ("in_proj_qkv",), (gdn.conv_channels, hidden), tiled=tiled)
    z = _project(g, n, module, ("in_proj_z",), (gdn.value_width, hidden), tiled=tiled)
    ba = _project(g, n, module, ("in_proj_b", "in_proj_a"), (2 * heads, hidden), tiled=tiled)
    state, history = gdn_state(g, target, layer)
    q, k, v = g.call(
        "gdn_conv",
        "conv",
        x=columns,
        weight=g.weight(
            f"target.{module}.conv1d",
            (f"target/{module}.conv1d.weight",),
            (gdn.conv_channels, gdn.conv_taps),
        ),
        history=history,
        slots=inputs.slots,
        key_heads=gdn.key_heads,
        key_dim=gdn.key_dim,
        value_heads=heads,
        value_dim=gdn.value_dim,
    )
    beta, decay = g.call(
        "gdn_gates",
        "gates",
        ba=ba,
        a_log=g.weight(f"target.{module}.A_log", (f"target/{module}.A_log",), (heads,), "float32"),
        dt_bias=g.weight(
            f"target.{module}.dt_bias", (f"target/{module}.dt_bias",), (heads,), "float32"
        ),
        value_heads=heads,
    )
    call = {
        "q": q,
        "k": k,
        "v": v,
        "beta": beta,
        "g": decay,
        "slots": inputs.slots,
        "live": inputs.live,
    }
    record = None
    if prefill:
        y = g.call("gdn_scan", "scan", state=state, **call)
        g.call(
            "conv_history_commit",
            columns=columns,
            history=history,
            slots=inputs.slots,
            committed=inputs.live,
        )
    else:
        y = g.call("gdn_recurrence", "recurrence", state=state, **call)
        record = Records(*(g.retain(value) for value in (columns, k, v, beta, decay)))
    normed = g.call(
        "gated_norm",
        y=y,
        z=z,
        weight=g.weight(
            f"target.{module}.norm", (f"target/{module}.norm.weight",), (gdn.value_dim,)
        ),
        value_heads=heads,
        value_dim=gdn.value_dim,
        eps=target.norm_eps,
    )
    return _project(
        g, normed, module, ("out_proj",), (hidden, gdn.value_width), tiled=tiled
    ), record


def _feed_forward(
    g: GraphBuilder, target: TargetGeometry, layer: int, n: Value, *, tiled: bool
) -> Value:
    assert isinstance(target.ffn, DenseFfn), "ModelPair.builder refuses other feed-forwards"
    width, module = target.ffn.width, f"layers.{layer}.mlp"
    both = _project(g, n, module, ("gate_proj", "up_proj"), (2 * width, target.hidden), tiled=tiled)
    y = g.call("swiglu", gate_up=both, ffn_width=width)
    return _project(g, y, module, ("down_proj",), (target.hidden, width), tiled=tiled)
