"""Declared rounds: sound, complete, and of the sizes that the spec states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from dflash_graph.checkpoint import draft_schema, target_schema
from dflash_graph.errors import OptionError, UnsupportedModelError
from dflash_graph.geometry import (
    AttentionGeometry,
    GdnGeometry,
    MoeFfn,
    TargetGeometry,
    layer_indices,
)
from dflash_graph.graph import Backend, Graph, Value
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.qwen3_5 import record_specs
from dflash_graph.models.round import (
    Round,
    declare_first_token,
    declare_prefill,
    declare_round,
    declare_state,
)
from dflash_graph.passes.check import check, check_segments
from dflash_graph.report import record_bytes, storages
from dflash_graph.state import Capacities, plan_state

MIB = 2**20

#: The 35B-A3B target of the spec's table.
MOE_35B = TargetGeometry(
    architecture="Qwen3_5MoeForCausalLM",
    hidden=2048,
    vocab=248320,
    layer_types=(*["linear_attention"] * 3, "full_attention") * 10,
    attention=AttentionGeometry(16, 2, 256, 64, 1e7),
    gdn=GdnGeometry(16, 32, 128, 128, 4),
    ffn=MoeFfn(256, 512, 8, 512),
    norm_eps=1e-6,
    tied_head=False,
    mrope_section=(11, 11, 10),
    weight_prefix="model.",
    dtype="bfloat16",
)


def parts(graphs: Iterable[Graph]) -> set[str]:
    return {
        part
        for graph in graphs
        for value in graph.by_role("weight")
        if value.weight
        for part in value.weight.parts
    }


def schema_parts(pair: ModelPair, *, draft: bool = True) -> set[str]:
    """Names of all tensors of a pair's checkpoints, with their role."""
    names = {f"target/{name}" for name in target_schema(pair.target)}
    if draft and pair.draft:
        names |= {f"draft/{name}" for name in draft_schema(pair.draft)}
    return names


def all_names(values: Sequence[Value]) -> set[str]:
    return {value.name for value in values}


def expected_retained(pair: ModelPair, declared: Round) -> dict[str, object]:
    """Records, features and the final hidden, by the names their nodes give them."""
    key = declared.forward.key
    lead = (key.batch, key.columns)
    names = {"columns": "qkv", "k": "conv.k", "v": "conv.v", "beta": "gates.beta"}
    names["decay"] = "gates.g"
    found: dict[str, object] = {}
    for name, spec in record_specs(pair.target, key.dtype, *lead).items():
        _, layer, kind = name.split(".")
        found[f"verify/layer.{layer}/mixer/{names[kind]}"] = spec
    row = declared.forward.values["verify/final_norm"].spec
    found["verify/final_norm"] = row
    if key.draft_tokens and pair.draft:
        found |= {f"verify/layer.{n}/ffn/residual": row for n in pair.draft.target_layer_ids}
    return found


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("draft_tokens", [0, 1, 7, 15])
def test_a_round_is_sound_and_complete(pair: ModelPair, draft_tokens: int, batch: int) -> None:
    declared = declare_round(pair, "eager", draft_tokens=draft_tokens, batch=batch)
    forward, finish = declared.segments
    check_segments(declared.segments)

    assert parts(declared.segments) == schema_parts(pair, draft=draft_tokens > 0)

    retained = {value.name: value.spec for value in forward.by_role("retained")}
    assert retained == expected_retained(pair, declared)
    assert {value.name: value.spec for value in finish.by_role("retained")} == retained
    for node in finish.nodes:
        assert not node.outputs, "commit computes nothing that is kept but state"
        assert {finish.values[name].role for _, name in node.operands()} <= {
            "retained", "state", "input",
        }  # fmt: skip

    state = declare_state(pair, draft_tokens + 1)
    touched = all_names([v for graph in declared.segments for v in graph.by_role("state")])
    kept = {v.name for v in state if draft_tokens or not v.name.startswith("draft.")}
    assert touched == kept - {"target.token_counts"}, "a greedy round touches all but the counts"
    sampled = declare_round(pair, "eager", draft_tokens=draft_tokens, batch=1, sampling=True)
    touched = all_names([v for graph in sampled.segments for v in graph.by_role("state")])
    assert touched == kept, "a sampled round touches every state and no other"


def test_regions_are_the_parts_of_a_round(pair: ModelPair) -> None:
    forward, finish = declare_round(pair, "eager", draft_tokens=7, batch=1).segments
    assert pair.draft
    order = ("materialize", "propose", "verify", "accept")
    tops = [node.region.split("/")[0] for node in forward.nodes]
    assert list(dict.fromkeys(tops)) == list(order)
    assert tops == sorted(tops, key=order.index), "each part is declared in one piece"
    layers: dict[str, set[str]] = {top: set() for top in (*order, "commit")}
    for node in (*forward.nodes, *finish.nodes):
        top, _, below = node.region.partition("/")
        if below.startswith("layer."):
            layers[top].add(below.split("/")[0])
    assert layers["materialize"] == {f"layer.{n}" for n in range(pair.draft.layers)}
    assert layers["propose"] == layers["materialize"]
    assert layers["verify"] == {f"layer.{n}" for n in range(pair.target.layers)}
    linear = layer_indices(pair.target.layer_types, "linear_attention")
    assert layers["commit"] == {f"layer.{n}" for n in linear}
    assert not layers["accept"]
    for graph in (forward, finish):
        for node in graph.nodes:
            assert node.name.startswith(f"{node.region}/"), "a node's name begins with its region"


def test_frames_and_results_of_a_round(pair: ModelPair) -> None:
    declared = declare_round(pair, "eager", draft_tokens=7, batch=2)
    assert {v.name: v.spec.shape for v in declared.forward.by_role("input")} == {
        "slots": (2,),
        "page_table": (2, "request_pages"),
        "anchor": (2,),
        "frontier": (2,),
        "live_drafts": (2,),
        "live_columns": (2,),
        "positions": (3, 2, 8),
        "context_positions": (1, 2, 8),
        "context_frontier": (2,),
        "pending": (2,),
        "draft_positions": (1, 2, 8),
        "draft_columns": (2,),
    }
    assert all_names(declared.finish.by_role("input")) == {"slots", "committed"}
    assert {v.name: v.spec.shape for v in declared.forward.by_role("output")} == {
        "verify/ids": (2, 8),
        "accept/greedy.accepted": (2,),
        "accept/greedy.licensed": (2,),
        "accept/greedy.outputs": (2, 8),
        "accept/greedy.finite": (2,),
    }
    assert not declared.finish.by_role("output")


def test_given_drafts_stand_in_the_frame(pair: ModelPair) -> None:
    declared = declare_round(pair, "eager", draft_tokens=3, batch=2, given_drafts=True)
    check_segments(declared.segments)
    assert declared.forward.values["drafts"].spec.shape == (2, 3)
    assert not declared.forward.region_nodes("propose")
    check_segments(
        declare_round(
            replace(pair, draft=None), "eager", draft_tokens=3, batch=1, given_drafts=True
        ).segments
    )


def test_scores_are_retained_on_request(large_dflash2_pair: ModelPair) -> None:
    pair = large_dflash2_pair
    declared = declare_round(pair, "eager", draft_tokens=1, batch=1, scores=True)
    check_segments(declared.segments)
    assert str(declared.forward.values["verify/scores"].spec) == "float32[1, 2, 248320]"
    assert declared.forward.values["verify/scores"].role == "retained"


@pytest.mark.parametrize("tokens", [1, 256, 1024])
def test_prefill_is_sound_and_reads_what_it_should(pair: ModelPair, tokens: int) -> None:
    graph = check(declare_prefill(pair, "eager", tokens=tokens))
    assert pair.draft
    head = {"target/lm_head.weight"} if not pair.target.tied_head else set()
    assert {name for name in parts([graph]) if name.startswith("target/")} == {
        name for name in schema_parts(pair) - head if name.startswith("target/")
    }
    assert not graph.by_role("retained", "output")
    context = {node.op for node in graph.region_nodes("context")}
    assert context <= {
        "join_features", "linear", "rms_norm", "rotary_table",
        "context_kv", "append_kv", "ring_append",
    }, "no prompt token passes the draft's residual stack"  # fmt: skip


def test_the_first_token_reads_the_continuation_hidden_and_the_head(pair: ModelPair) -> None:
    graph = check(declare_first_token(pair, "eager"))
    assert all_names(graph.by_role("state")) == {"target.continuation_hidden"}
    assert len(parts([graph])) == 1


def test_a_target_alone_decodes_plainly(pair: ModelPair) -> None:
    alone = replace(pair, draft=None)
    declared = declare_round(alone, "eager", draft_tokens=0, batch=1)
    check_segments(declared.segments)
    assert parts(declared.segments) == schema_parts(alone)
    check(declare_prefill(alone, "eager", tokens=8))


@pytest.mark.parametrize(("draft_tokens", "batch"), [(-1, 1), (16, 1), (7, 0), (7, 9)])
def test_numbers_out_of_range_are_refused(
    large_dflash2_pair: ModelPair, draft_tokens: int, batch: int
) -> None:
    with pytest.raises(OptionError, match=r"expected \d+\.\.\d+, got"):
        declare_round(large_dflash2_pair, "eager", draft_tokens=draft_tokens, batch=batch)


def test_drafts_need_a_draft(large_dflash2_pair: ModelPair) -> None:
    with pytest.raises(OptionError, match=r"expected 0 .*got 7"):
        declare_round(replace(large_dflash2_pair, draft=None), "eager", draft_tokens=7, batch=1)


@pytest.mark.parametrize(
    "declare",
    [
        pytest.param(
            lambda pair: declare_round(pair, "eager", draft_tokens=0, batch=1), id="round"
        ),
        pytest.param(lambda pair: declare_prefill(pair, "eager", tokens=8), id="prefill"),
        pytest.param(lambda pair: declare_first_token(pair, "eager"), id="first token"),
    ],
)
def test_a_mixture_of_experts_has_state_but_no_graph(
    declare: Callable[[ModelPair], object],
) -> None:
    pair = ModelPair(MOE_35B, dtype="bfloat16")
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        declare(pair)
    assert len(declare_state(pair, 8)) == 2 * 40 + 2


def kinds(pair: ModelPair, *, columns: int = 8) -> dict[str, int]:
    """Bytes of one slot or page over all layers, by kind of state."""
    state = plan_state(declare_state(pair, columns), Capacities(slots=2, context=640))
    return {kind: one for kind, (_, one, _) in state.kinds().items()}


def test_state_of_the_27b(large_dflash2_pair: ModelPair) -> None:
    assert kinds(large_dflash2_pair) == {
        "target.gdn_state": 144 * MIB,
        "target.conv_history": int(2.8125 * MIB),
        "target.pages": 16 * 2 * 64 * 4 * 256 * 2,
        "target.continuation_hidden": 5120 * 2,
        "target.token_counts": 248320 * 4,
        "draft.ring": 40 * MIB,
        "draft.pending_features": 8 * 5 * 5120 * 2,
    }


def test_a_full_draft_layer_has_pages(large_pair: ModelPair) -> None:
    sizes = kinds(large_pair)
    assert sizes["draft.ring"] == 40 * MIB, "five local layers in both drafts"
    assert large_pair.draft
    if large_pair.draft.kind == "dflash":
        assert sizes["draft.pages"] == 2 * 64 * 8 * 128 * 2
    else:
        assert "draft.pages" not in sizes


def test_state_of_the_35b() -> None:
    sizes = kinds(ModelPair(MOE_35B, dtype="bfloat16"))
    assert sizes["target.gdn_state"] == 60 * MIB
    assert sizes["target.conv_history"] == int(1.40625 * MIB)


def test_records_of_a_column(large_dflash2_pair: ModelPair) -> None:
    """Of the graphs as declared what the specification states; kernels keep corrections, float32,
    in the place of v and beta."""
    sizes = {}
    backends: tuple[Backend, ...] = ("eager", "inductor", "triton")
    for backend in backends:
        declared = declare_round(large_dflash2_pair, backend, draft_tokens=3, batch=2)
        sizes[backend] = record_bytes(declared.finish)
    gdn = large_dflash2_pair.target.gdn
    assert gdn is not None
    more = 48 * (gdn.value_heads * gdn.value_dim * (4 - 2) - gdn.value_heads * 4)
    assert sizes == {"eager": 1_787_904, "inductor": 1_787_904, "triton": 1_787_904 + more}
    declared_35b = record_specs(MOE_35B, "bfloat16", batch=1, columns=1)
    assert sum(spec.nbytes() for spec in declared_35b.values()) == 867_840


@pytest.mark.parametrize(("batch", "draft_tokens"), [(1, 0), (1, 7), (8, 15)])
def test_a_graph_keeps_records_features_and_hidden_only(
    large_pair: ModelPair, batch: int, draft_tokens: int
) -> None:
    declared = declare_round(large_pair, "eager", draft_tokens=draft_tokens, batch=batch)
    forward = declared.forward
    assert large_pair.draft
    features = len(large_pair.draft.target_layer_ids) if draft_tokens else 0
    row = large_pair.target.hidden * 2
    column = record_bytes(declared.finish) + (features + 1) * row
    kept = sum(value.spec.nbytes() for value in forward.by_role("retained"))
    assert kept == batch * (draft_tokens + 1) * column


def streamed_bytes(graph: Graph, *regions: str) -> int:
    """Bytes of the weights that nodes below some regions read from end to end, each storage once.

    A table that an op looks rows up in (embedding, codebooks) does not count.
    """
    read = [
        graph.values[name].weight
        for region in regions
        for node in graph.region_nodes(region)
        for _, name in node.operands()
        if node.op not in ("embedding", "selector_walk")
    ]
    return sum(use.spec.nbytes() for use in storages(use for use in read if use is not None))


def test_a_verify_of_the_27b_reads_its_weights(large_pair: ModelPair) -> None:
    """All layers, the final norm and the head; not the embedding (2.54 GB), which is looked up."""
    forward = declare_round(large_pair, "eager", draft_tokens=7, batch=1).forward
    assert streamed_bytes(forward, "verify") == pytest.approx(51.25e9, rel=1e-3)


def test_a_proposal_of_the_27b_reads_its_weights(large_dflash2_pair: ModelPair) -> None:
    """Context and block of the draft, and the target's head; context and block K/V are one storage.

    The embedding and the selector's codebooks are looked up and do not count.
    """
    forward = declare_round(large_dflash2_pair, "eager", draft_tokens=7, batch=1).forward
    assert streamed_bytes(forward, "materialize", "propose") == pytest.approx(6.13e9, rel=1e-2)
    head = forward.values["target.lm_head"].spec.nbytes()
    layers = streamed_bytes(forward, "propose") - head
    assert layers == pytest.approx(5 * (5120 * 10240 + 4096 * 5120 + 3 * 5120 * 17408) * 2, rel=0.1)


@pytest.mark.parametrize("batch", [1, 8])
def test_cost_reads_weights_once_whatever_the_batch(
    large_dflash2_pair: ModelPair, batch: int
) -> None:
    """What a verify moves beside its weights is small: activations, state and context."""
    forward = declare_round(large_dflash2_pair, "eager", draft_tokens=7, batch=batch).forward
    costs = forward.cost(context=1024)
    moved = sum(costs[node.name].read_bytes for node in forward.region_nodes("verify"))
    weights = streamed_bytes(forward, "verify")
    per_request = (144 + 2.8125 + 2 * 16 * 1032 * 4 * 256 * 2 / MIB) * MIB
    assert weights + batch * per_request < moved < weights + batch * (per_request + 250 * MIB)
