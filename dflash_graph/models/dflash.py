"""The DFlash draft: context from target features, one masked block forward, argmax proposals (spec
section 3).

DFlash2 shares the context and the block; `declare_block` takes its convolution from the geometry.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_graph.geometry import DraftGeometry
from dflash_graph.graph import GraphBuilder, Value
from dflash_graph.models.pair import PAGE_SIZE, ModelPair
from dflash_graph.models.qwen3_5 import embedding_weight, head_weight


@dataclass(frozen=True)
class ContextInputs:
    """Where context columns go.

    Args:
        positions: `[1, B, W]` absolute positions of the columns.
        slots: `[B]`.
        page_table: `[B, M]`.
        start: `[B]` the context frontier.
        live: `[B]` columns to materialize.
    """

    positions: Value
    slots: Value
    page_table: Value
    start: Value
    live: Value


@dataclass(frozen=True)
class BlockInputs:
    """What a proposal starts from.

    Args:
        anchor: `[B]` token at the frontier.
        positions: `[1, B, W]` positions F..F+K.
        slots: `[B]`.
        page_table: `[B, M]`.
        frontier: `[B]` F, where the draft's context ends.
        live: `[B]` columns that attention sees.
    """

    anchor: Value
    positions: Value
    slots: Value
    page_table: Value
    frontier: Value
    live: Value


@dataclass(frozen=True)
class SamplingInputs:
    """Sampling values of each request: `[B]`, and the seed's two words `[B, 2]`."""

    temperature: Value
    top_k: Value
    top_p: Value
    min_p: Value
    presence: Value
    frequency: Value
    seed: Value


@dataclass(frozen=True)
class Proposal:
    """What a draft proposes.

    Args:
        drafts: `[B, K]` ids.
        candidates: `[B, K, C]` ids that each draft was drawn from, or None where q is a point mass.
        draft_probs: `[B, K, C]` float32, q over the candidates.
    """

    drafts: Value
    candidates: Value | None = None
    draft_probs: Value | None = None


def context_state(g: GraphBuilder, draft: DraftGeometry, layer: int) -> tuple[Value, Value]:
    """Context K/V of a layer: a ring of S positions where it is local, pages where it is full."""
    a = draft.attention
    if draft.layer_types[layer] == "full_attention":
        shape: tuple[int | str, ...] = ("pages", a.kv_heads, PAGE_SIZE, a.head_dim)
        kind = "pages"
    else:
        assert draft.window is not None, "a local layer needs a window"
        shape, kind = ("slots", draft.window, a.kv_heads, a.head_dim), "ring"
    return (
        g.state(f"draft.layers.{layer}.k_{kind}", shape),
        g.state(f"draft.layers.{layer}.v_{kind}", shape),
    )


def pending_state(g: GraphBuilder, draft: DraftGeometry, columns: int) -> Value:
    """Features of committed columns that are not yet context, `[slots, W, n H]`."""
    return g.state("draft.pending_features", ("slots", columns, draft.feature_width))


def declare_state(g: GraphBuilder, draft: DraftGeometry, columns: int) -> None:
    """Declare every state of the draft; what pools are planned from."""
    for layer in range(draft.layers):
        context_state(g, draft, layer)
    pending_state(g, draft, columns)


def declare_context(
    g: GraphBuilder, draft: DraftGeometry, features: Value, inputs: ContextInputs, *, tiled: bool
) -> None:
    """Turn target features `[B, W, n H]` into context K/V of every layer."""
    a = draft.attention
    fc = g.weight("draft.fc", ("draft/fc.weight",), (draft.hidden, draft.feature_width))
    c = g.call("linear", "fc", x=features, weight=fc, tiled=tiled)
    c = _norm(g, draft, c, "hidden_norm", "hidden_norm")
    cos, sin = _rotary(g, draft, inputs.positions)
    for layer, kind in enumerate(draft.layer_types):
        module = f"layers.{layer}.self_attn"
        with g.region(f"layer.{layer}"):
            k, v = g.call(
                "context_kv",
                c=c,
                weight=g.weight(
                    f"draft.{module}.context_kv",
                    (f"draft/{module}.k_proj.weight", f"draft/{module}.v_proj.weight"),
                    (2 * a.kv_width, draft.hidden),
                ),
                k_norm=_head_norm(g, draft, module, "k_norm"),
                cos=cos,
                sin=sin,
                kv_heads=a.kv_heads,
                head_dim=a.head_dim,
                rotary_half=a.rotary_dim // 2,
                eps=draft.norm_eps,
                tiled=tiled,
            )
            keys, values = context_state(g, draft, layer)
            place = {"start": inputs.start, "live": inputs.live}
            if kind == "full_attention":
                table = inputs.page_table
                g.call(
                    "append_kv", k=k, v=v, k_pages=keys, v_pages=values, page_table=table, **place
                )
            else:
                g.call(
                    "ring_append", k=k, v=v, k_ring=keys, v_ring=values, slots=inputs.slots, **place
                )


def declare_block(g: GraphBuilder, pair: ModelPair, inputs: BlockInputs) -> Value:
    """Declare the draft's forward over `[a, MASK x K]`; returns the final hidden `[B, W, H]`."""
    draft = pair.draft
    assert draft is not None
    ids = g.call(
        "block_ids", anchor=inputs.anchor, columns=g.key.columns, mask_token_id=draft.mask_token_id
    )
    scale = 1.0 if draft.embedding_scale is None else draft.embedding_scale
    x = g.call("embedding", ids=ids, table=embedding_weight(g, pair.target), scale=scale)
    rotary = _rotary(g, draft, inputs.positions)
    for layer in range(draft.layers):
        with g.region(f"layer.{layer}"):
            with g.region("attention"):
                n = _norm(g, draft, x, f"layers.{layer}.input_layernorm", "norm")
                n, delta = _prepare(g, draft, n, f"layers.{layer}.attention_conv")
                y = _attention(g, pair, draft, layer, n, inputs, rotary)
                y = _finish(g, draft, y, delta, f"layers.{layer}.attention_conv")
                x = g.call("residual_add", "residual", x=x, y=y)
            with g.region("ffn"):
                n = _norm(g, draft, x, f"layers.{layer}.post_attention_layernorm", "norm")
                n, delta = _prepare(g, draft, n, f"layers.{layer}.mlp_conv")
                y = _feed_forward(g, draft, layer, n)
                y = _finish(g, draft, y, delta, f"layers.{layer}.mlp_conv")
                x = g.call("residual_add", "residual", x=x, y=y)
    return _norm(g, draft, x, "norm", "final_norm")


def declare_proposal(
    g: GraphBuilder, pair: ModelPair, inputs: BlockInputs, sampling: SamplingInputs | None
) -> Proposal:
    """DFlash: the argmax of every mask column, a point mass also when the target samples."""
    hidden = declare_block(g, pair, inputs)
    drafts, _ = g.call(
        "head_argmax", x=hidden, weight=head_weight(g, pair.target), skip=1, **head_attributes(pair)
    )
    return Proposal(drafts)


def head_attributes(pair: ModelPair) -> dict[str, int | float]:
    """Attributes of the draft's head: public rows and the scales the config states."""
    draft = pair.draft
    assert draft is not None
    return {
        "public_vocab": pair.emitted_vocab,
        "multiplier": 1.0 if draft.output_multiplier is None else draft.output_multiplier,
        "softcap": 0.0 if draft.logit_softcap is None else draft.logit_softcap,
    }


def _norm(g: GraphBuilder, draft: DraftGeometry, x: Value, role: str, label: str) -> Value:
    weight = g.weight(f"draft.{role}", (f"draft/{role}.weight",), (draft.hidden,))
    value: Value = g.call("rms_norm", label, x=x, weight=weight, eps=draft.norm_eps, offset=False)
    return value


def _head_norm(g: GraphBuilder, draft: DraftGeometry, module: str, name: str) -> Value:
    return g.weight(
        f"draft.{module}.{name}", (f"draft/{module}.{name}.weight",), (draft.attention.head_dim,)
    )


def _rotary(g: GraphBuilder, draft: DraftGeometry, positions: Value) -> tuple[Value, Value]:
    tables: tuple[Value, Value] = g.call(
        "rotary_table",
        "rotary",
        positions=positions,
        rotary_half=draft.attention.rotary_dim // 2,
        theta=draft.attention.rope_theta,
        sections=(),
    )
    return tables


def _project(
    g: GraphBuilder, x: Value, module: str, names: tuple[str, ...], shape: tuple[int, int]
) -> Value:
    label = "_".join(name.removesuffix("_proj") for name in names)
    weight = g.weight(
        f"draft.{module}.{label}", tuple(f"draft/{module}.{n}.weight" for n in names), shape
    )
    value: Value = g.call("linear", label, x=x, weight=weight, tiled=True)
    return value


def _attention(
    g: GraphBuilder,
    pair: ModelPair,
    draft: DraftGeometry,
    layer: int,
    n: Value,
    inputs: BlockInputs,
    rotary: tuple[Value, Value],
) -> Value:
    a, module = draft.attention, f"layers.{layer}.self_attn"
    packed = (a.q_heads + 2 * a.kv_heads) * a.head_dim
    qkv = _project(g, n, module, ("q_proj", "k_proj", "v_proj"), (packed, draft.hidden))
    q, k, v = g.call(
        "head_norm_rope",
        qkv=qkv,
        q_norm=_head_norm(g, draft, module, "q_norm"),
        k_norm=_head_norm(g, draft, module, "k_norm"),
        cos=rotary[0],
        sin=rotary[1],
        query_parts=1,
        q_heads=a.q_heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        rotary_half=a.rotary_dim // 2,
        eps=draft.norm_eps,
        offset=False,
    )
    keys, values = context_state(g, draft, layer)
    call = {"q": q, "k": k, "v": v, "frontier": inputs.frontier, "live": inputs.live}
    call["causal"] = pair.is_causal(layer)
    if draft.layer_types[layer] == "full_attention":
        call |= {"k_pages": keys, "v_pages": values, "page_table": inputs.page_table}
        o = g.call("paged_block_attention", "attention", **call)
    else:
        call |= {"k_ring": keys, "v_ring": values, "slots": inputs.slots}
        o = g.call("ring_block_attention", "attention", **call)
    return _project(g, o, module, ("o_proj",), (draft.hidden, a.q_width))


def _feed_forward(g: GraphBuilder, draft: DraftGeometry, layer: int, n: Value) -> Value:
    width, module = draft.ffn_width, f"layers.{layer}.mlp"
    both = _project(g, n, module, ("gate_proj", "up_proj"), (2 * width, draft.hidden))
    y = g.call("swiglu", gate_up=both, ffn_width=width)
    return _project(g, y, module, ("down_proj",), (draft.hidden, width))


def _conv_base(g: GraphBuilder, draft: DraftGeometry, module: str) -> Value:
    return g.weight(
        f"draft.{module}.base_kernel", (f"draft/{module}.base_kernel",), (2, 2, draft.hidden)
    )


def _prepare(
    g: GraphBuilder, draft: DraftGeometry, n: Value, module: str
) -> tuple[Value, Value | None]:
    """DFlash2: side 0 of the grouped dynamic convolution, and the delta its other side will use."""
    if draft.conv is None:
        return n, None
    groups = draft.conv_groups
    prepared, delta = g.call(
        "conv_prepare",
        x=n,
        projection=g.weight(
            f"draft.{module}.kernel_projection",
            (f"draft/{module}.kernel_projection.weight",),
            (4 * groups, draft.hidden),
        ),
        base=_conv_base(g, draft, module),
        groups=groups,
    )
    return prepared, delta


def _finish(
    g: GraphBuilder, draft: DraftGeometry, y: Value, delta: Value | None, module: str
) -> Value:
    if delta is None:
        return y
    base = _conv_base(g, draft, module)
    value: Value = g.call("conv_finish", y=y, base=base, delta=delta, groups=draft.conv_groups)
    return value
