"""combine: small graph in, expected graph out; what must stay as it is; whole rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.delta_rule import delta_rule
from dflash_graph.errors import GraphError
from dflash_graph.geometry import read_draft_geometry, read_target_geometry
from dflash_graph.graph import Backend, Graph, GraphBuilder, GraphKey, Node, Value
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_round
from dflash_graph.op import dtype_of
from dflash_graph.passes.check import check, check_segments
from dflash_graph.passes.combine import combine
from dflash_graph.tensor import WeightUse
from dflash_graph.testing import F32_REDUCTION, assert_matches, same_bytes

GOLDEN = Path(__file__).parents[1] / "golden"
B, W, WIDTH = 2, 3, 8
CAPACITIES = {"slots": 4, "pages": 6}
Declare = Callable[[GraphBuilder, Value], None]

#: What each pattern is made of: none of it is left in the rounds of a pair that has it.
REPLACED = {
    "linear_residual_norm": ("residual_add",),
    "swiglu_linear": ("swiglu",),
    "gdn_mixer": ("gdn_conv", "gdn_gates", "gdn_recurrence", "gated_norm"),
    "gated_attention": ("paged_attention", "attention_gate"),
    "gdn_commit": ("gdn_fold", "conv_history_commit"),
    "linear_norm": (),
    "context_rings": ("context_kv", "ring_append"),
}


def declared(declare: Declare, backend: Backend = "triton") -> Graph:
    g = GraphBuilder(GraphKey("forward", backend, W - 1, B, W, "float32"))
    x = g.input("x", (B, W, WIDTH), "float32")
    with g.region("verify"), g.region("layer.0"):
        declare(g, x)
    return g.build()


def matrix(g: GraphBuilder, name: str, outputs: int = WIDTH, inputs: int = WIDTH) -> Value:
    return g.weight(name, (f"target/{name}",), (outputs, inputs))


def product(g: GraphBuilder, name: str, x: Value, outputs: int = WIDTH, **changes: Any) -> Value:
    weight = matrix(g, f"target.{name}", outputs, int(x.spec.shape[-1]))
    value: Value = g.call("linear", name, x=x, weight=weight, **{"tiled": True, **changes})
    return value


def norm(g: GraphBuilder, name: str, x: Value, *, eps: float = 1e-6, offset: bool = True) -> Value:
    weight = g.weight(f"{name}.weight", (f"target/{name}.weight",), (WIDTH,))
    value: Value = g.call("rms_norm", name, x=x, weight=weight, eps=eps, offset=offset)
    return value


def branch(g: GraphBuilder, x: Value) -> None:
    y = product(g, "down", x)
    out = g.retain(g.call("residual_add", "residual", x=x, y=y))
    g.output(norm(g, "next", out, eps=1e-5, offset=False))


def conv_branch(g: GraphBuilder, x: Value) -> None:
    y = product(g, "down", x)
    base = g.weight("base", ("draft/base",), (2, 2, WIDTH))
    delta = g.input("delta", (B, W, 2, 4), "float32")
    y = g.call("conv_finish", "finish", y=y, base=base, delta=delta, groups=4)
    out = g.call("residual_add", "residual", x=x, y=y)
    n = norm(g, "next", out)
    g.output(g.call("residual_add", "later", x=out, y=n))


def context(g: GraphBuilder, x: Value) -> None:
    g.output(norm(g, "hidden_norm", product(g, "fc", x), eps=1e-5, offset=False))


def feed_forward(g: GraphBuilder, x: Value) -> None:
    y = g.call("swiglu", "act", gate_up=product(g, "gate_up", x, 10), ffn_width=5)
    g.output(product(g, "down", y))


def delta_net(g: GraphBuilder, x: Value) -> None:
    slots, live = g.input("slots", (B,)), g.input("live", (B,))
    heads = {"key_heads": 1, "key_dim": 4, "value_heads": 2, "value_dim": 3}
    columns = product(g, "linear_attn.qkv", x, 14)
    z = product(g, "linear_attn.z", x, 6)
    ba = product(g, "linear_attn.b_a", x, 4)
    q, k, v = g.call(
        "gdn_conv",
        "conv",
        x=columns,
        weight=matrix(g, "taps", 14, 4),
        history=g.state("history", ("slots", 3, 14)),
        slots=slots,
        **heads,
    )
    vectors = {n: g.weight(n, (f"target/{n}",), (2,), "float32") for n in ("a_log", "dt_bias")}
    beta, decay = g.call("gdn_gates", "gates", ba=ba, **vectors, value_heads=2)
    state = g.state("state", ("slots", 2, 3, 4), "float32")
    rule = {"q": q, "k": k, "v": v, "beta": beta, "g": decay, "slots": slots, "live": live}
    y = g.call("gdn_recurrence", "recurrence", state=state, **rule)
    for record in (columns, k, v, beta, decay):
        g.retain(record)
    weight = g.weight("head_norm", ("target/head_norm",), (3,))
    widths = {"value_heads": 2, "value_dim": 3}
    normed = g.call("gated_norm", "normed", y=y, z=z, weight=weight, eps=1e-5, **widths)
    g.output(product(g, "out", normed))


def attention(g: GraphBuilder, x: Value, *, shares_pages: bool = False) -> None:
    heads = {"q_heads": 2, "kv_heads": 1, "head_dim": 4}
    qkv = product(g, "qkv", x, 24)
    norms = {n: g.weight(n, (f"target/{n}",), (4,)) for n in ("q_norm", "k_norm")}
    turns = {n: g.input(n, (B, W, 2), "float32") for n in ("cos", "sin")}
    law = {"query_parts": 2, "rotary_half": 2, "eps": 1e-6, "offset": True}
    q, k, v = g.call("head_norm_rope", "rope", qkv=qkv, **norms, **turns, **heads, **law)
    pages = {n: g.state(n, ("pages", 1, 4, 4)) for n in ("k_pages", "v_pages")}
    place = {n: g.input(n, (B,)) for n in ("start", "live")}
    place["page_table"] = g.input("page_table", (B, 3))
    g.call("append_kv", "append", k=k, v=v, **pages, **place)
    if shares_pages:
        other = g.input("other", (B, W, 2, 4), "float32")
        g.output(g.call("paged_attention", "shares", q=other, **pages, **place))
    o = g.call("paged_attention", "attention", q=q, **pages, **place)
    g.output(product(g, "o", g.call("attention_gate", "gate", o=o, qkv=qkv, **heads)))


def rings(g: GraphBuilder, x: Value, *, read_between: bool = False) -> None:
    turns = {n: g.input(n, (B, W, 2), "float32") for n in ("cos", "sin")}
    place = {n: g.input(n, (B,)) for n in ("slots", "start", "live")}
    heads = {"kv_heads": 1, "head_dim": 4, "rotary_half": 2, "eps": 1e-6}
    for layer in range(3):
        with g.region(f"context.{layer}"):
            weight = matrix(g, f"kv.{layer}")
            k_norm = g.weight(f"k_norm.{layer}", (f"draft/k_norm.{layer}",), (4,))
            made = {"c": x, "weight": weight, "k_norm": k_norm, **turns, **heads, "tiled": True}
            k, v = g.call("context_kv", "kv", **made)
            shape = ("slots", 5, 1, 4)
            keys, values = (g.state(f"{n}_ring.{layer}", shape) for n in "kv")
            g.call("ring_append", "append", k=k, v=v, k_ring=keys, v_ring=values, **place)
            if read_between:
                q, n = (g.input(f"{m}.{layer}", (B, W, 1, 4), "float32") for m in "qn")
                block = {"q": q, "k": n, "v": n, "frontier": place["start"], "live": place["live"]}
                rings = {"k_ring": keys, "v_ring": values, "slots": place["slots"]}
                g.output(g.call("ring_block_attention", "read", **block, **rings, causal=False))


def commit(
    g: GraphBuilder, x: Value, *, regions: str = "part.{}", counts: str = "committed"
) -> None:
    for layer in range(2):
        where = {n: g.input(n.format(layer), (B,)) for n in ("slots", counts)}
        where["committed"] = where.pop(counts)
        with g.region(regions.format(layer)):
            shapes = {"k": (1, 4), "v": (2, 3), "beta": (2,), "g": (2,)}
            records = {
                n: g.input(f"{n}.{layer}", (B, W, *shape), "float32") for n, shape in shapes.items()
            }
            state = g.state(f"state.{layer}", ("slots", 2, 3, 4), "float32")
            g.call("gdn_fold", "fold", state=state, **records, **where)
            columns = g.input(f"columns.{layer}", (B, W, 14), "float32")
            history = g.state(f"history.{layer}", ("slots", 3, 14))
            g.call("conv_history_commit", "history", columns=columns, history=history, **where)


#: Declaration, and the ops after the pass.
PATTERNS: Mapping[str, tuple[Declare, list[str]]] = {
    "branch": (branch, ["linear_residual_norm"]),
    "conv_branch": (conv_branch, ["linear_conv_residual_norm", "residual_add"]),
    "context": (context, ["linear_norm"]),
    "feed_forward": (feed_forward, ["swiglu_linear", "linear"]),
    "delta_net": (delta_net, ["gdn_project", "gdn_mixer", "linear"]),
    "attention": (attention, ["linear", "rope_append", "gated_attention", "linear"]),
    "rings": (rings, ["context_rings"]),
    "commit": (commit, ["gdn_commit"]),
}


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def only(graph: Graph, op: str) -> Node:
    (node,) = (node for node in graph.nodes if node.op == op)
    return node


def tensors_of(graph: Graph, rng: torch.Generator, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of all that comes from outside; weights are put together of `parts`."""
    tensors: dict[str, Tensor] = {}
    for value in graph.by_role("input", "weight", "state"):
        shape = value.spec.bind(CAPACITIES)
        if value.weight is not None:
            names = value.weight.parts
            tensors[value.name] = torch.cat([parts[name] for name in names]).view(shape)
        elif value.spec.dtype == "int32":
            choice = {
                "slots": torch.tensor([3, 1]),
                "live": torch.tensor([W, 2]),
                "committed": torch.tensor([2, W]),
                "start": torch.tensor([3, 6]),
                "page_table": torch.tensor([[5, 0, 3], [2, 4, 1]]),
            }
            tensors[value.name] = choice[value.name].to(torch.int32)
        else:
            made = torch.randn(shape, generator=rng)
            tensors[value.name] = made.to(dtype_of(value.spec.dtype))
    return tensors


def weight_parts(graph: Graph, rng: torch.Generator) -> dict[str, Tensor]:
    """A tensor of each checkpoint tensor; before the pass no weight here is stacked."""
    made = {}
    for value in graph.by_role("weight"):
        assert value.weight is not None
        (part,) = value.weight.parts
        made[part] = torch.randn(value.spec.bind({}), generator=rng)
    return made


def evaluate(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is kept, returned and changed, by the references of the nodes one after another."""
    tensors = {name: tensor.clone() for name, tensor in given.items()}
    for node in graph.nodes:
        arguments = {
            argument: tensors[names] if isinstance(names, str) else [tensors[n] for n in names]
            for argument, names in node.inputs.items()
        }
        results = node.contract.reference(**arguments, **node.attributes)
        results = results if isinstance(results, tuple) else (results,)
        tensors.update(zip(node.outputs.values(), results, strict=False))
    return {v.name: tensors[v.name] for v in graph.by_role("retained", "output", "state")}


def others(values: Sequence[Value]) -> list[Value]:
    """All but the records v and beta of a delta rule, and the correction in their place."""
    swapped = (
        "conv.v",
        "gates.beta",
        "conv.u",
        *(f"{n}.{i}" for n in ("v", "beta") for i in (0, 1)),
    )
    names = (*swapped, "v.0.u", "v.1.u")
    return [value for value in values if value.name.rpartition("/")[2] not in names]


def corrections(tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    """u of the rule whose k, v, beta, g and state have these names, of all columns."""
    k, v, beta, g, state = (tensors[name] for name in names)
    u = torch.empty(v.shape)
    delta_rule(
        k, v, beta, g, state, tensors["slots"], torch.tensor([W, W]), store=False, corrections=u
    )
    return u


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_becomes_one_op(pattern: str) -> None:
    declare, after = PATTERNS[pattern]
    graph = declared(declare)
    found = check(combine(graph))
    assert ops(found) == after
    assert len({node.name for node in found.nodes}) == len(after)
    for role in ("input", "state", "retained", "output"):
        assert others(found.by_role(role)) == others(graph.by_role(role)), role
    assert combine(found) is found


def test_a_state_is_found_as_it_was_left() -> None:
    """By nodes that no pattern knows of, too: a rewrite that would change that is an error."""
    for declare, name in (
        (partial(rings, read_between=True), "context.0/read"),
        (partial(attention, shares_pages=True), "shares"),
    ):
        with pytest.raises(GraphError, match=rf"verify/layer\.0/{name}.*side by side"):
            combine(declared(declare))


@pytest.mark.parametrize("changes", [{"regions": "all"}, {"counts": "committed.{}"}])
def test_layers_that_commit_apart_stay_apart(changes: dict[str, str]) -> None:
    graph = declared(partial(commit, **changes))
    assert combine(graph) is graph


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_joint_op_gives_what_the_ops_give_one_by_one(pattern: str, rng: Any) -> None:
    """To the bit, but for a stacked weight: a BLAS may sum other features in another order."""
    graph = declared(PATTERNS[pattern][0])
    found = combine(graph)
    parts = weight_parts(graph, rng)
    given = tensors_of(graph, rng, parts)
    changed = {n: t for n, t in tensors_of(found, rng, parts).items() if n not in given}
    if pattern == "commit":
        for i in (0, 1):
            names = (f"{name}.{i}" for name in ("k", "v", "beta", "g", "state"))
            changed[f"v.{i}.u"] = corrections(given, *names)
    expected = evaluate(graph, given)
    assert expected
    if pattern == "delta_net":
        place = "verify/layer.0"
        records = ("conv.k", "conv.v", "gates.beta", "gates.g")
        names = [f"{place}/{name}" for name in records]
        live = torch.arange(W) < given["live"][:, None]
        u = corrections({**given, **expected}, *names, "state")
        expected[f"{place}/conv.u"] = u * live[..., None, None]
    for name, value in evaluate(found, {**given, **changed}).items():
        if pattern == "delta_net":
            assert_matches(value, expected[name], F32_REDUCTION, name)
        else:
            assert same_bytes(value, expected[name]), name


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_other_backends_keep_their_graph(pattern: str, backend: Backend) -> None:
    graph = declared(PATTERNS[pattern][0], backend)
    assert combine(graph) is graph


def test_arguments_of_a_branch_end() -> None:
    (node,) = combine(declared(branch)).nodes
    assert (node.name, node.region) == ("verify/layer.0/down", "verify/layer.0")
    assert node.inputs == {"y": "x", "weight": "target.down", "x": "x", "norm": "next.weight"}
    assert node.outputs == {"out": "verify/layer.0/residual", "n": "verify/layer.0/next"}
    assert node.attributes == {"eps": 1e-5, "offset": False}


def test_arguments_of_a_convolved_branch_end() -> None:
    node = only(combine(declared(conv_branch)), "linear_conv_residual_norm")
    assert (node.inputs["base"], node.inputs["delta"]) == ("base", "delta")
    assert node.attributes == {"groups": 4, "eps": 1e-6, "offset": True}


def test_what_is_no_longer_stored_is_gone() -> None:
    gone = {"branch": {"down"}, "attention": {"rope.k", "rope.v", "attention"}}
    for pattern, names in gone.items():
        graph = declared(PATTERNS[pattern][0])
        found = graph.values.keys() - combine(graph).values.keys()
        assert found == {f"verify/layer.0/{name}" for name in names}


def test_weights_of_a_delta_net_are_stacked() -> None:
    graph = declared(delta_net)
    found = combine(graph)
    project, mixer = only(found, "gdn_project"), only(found, "gdn_mixer")
    stacked = found.values[str(project.inputs["weight"])]
    names = ("qkv", "z", "b_a")
    assert stacked.name == "target.linear_attn.in_proj"
    parts = tuple(f"target/target.linear_attn.{name}" for name in names)
    assert stacked.weight == WeightUse(parts, stacked.spec)
    assert stacked.spec.shape == (14 + 6 + 4, WIDTH)
    assert not {f"target.linear_attn.{name}" for name in names} & found.values.keys()
    assert project.attributes == {"channels": 14, "value_width": 6, "heads": 2}
    assert list(project.outputs.values()) == [mixer.inputs[name] for name in ("x", "z", "ba")]
    assert mixer.attributes["eps"] == 1e-5


def test_layers_of_rings_stand_in_their_order() -> None:
    node = only(combine(declared(rings)), "context_rings")
    assert (node.name, node.region) == ("verify/layer.0/rings", "verify/layer.0")
    for argument, name in (("weights", "kv"), ("k_norms", "k_norm"), ("v_rings", "v_ring")):
        assert node.inputs[argument] == tuple(f"{name}.{layer}" for layer in range(3))
    assert node.attributes["layers"] == 3


def test_a_residual_that_is_read_before_the_norm() -> None:
    """Its reader stands between sum and norm, so the joint op may not stand at the norm."""

    def declare(g: GraphBuilder, x: Value) -> None:
        out = g.call("residual_add", "residual", x=x, y=product(g, "down", x))
        between = g.call("residual_add", "between", x=out, y=x)
        g.output(g.call("residual_add", "last", x=between, y=norm(g, "next", out)))

    found = combine(declared(declare))
    assert ops(found) == ["linear_residual_norm", "residual_add", "residual_add"]


def read_elsewhere(g: GraphBuilder, y: Value) -> None:
    g.output(g.call("residual_add", "other", x=y, y=y))


def kept(g: GraphBuilder, y: Value) -> None:
    g.retain(y)


def returned(g: GraphBuilder, y: Value) -> None:
    g.output(y)


@pytest.mark.parametrize("use", [read_elsewhere, kept, returned])
@pytest.mark.parametrize("pattern", ["branch", "finish", "norm", "swiglu"])
def test_an_intermediate_that_is_wanted_keeps_its_ops(
    pattern: str, use: Callable[[GraphBuilder, Value], None]
) -> None:
    def declare(g: GraphBuilder, x: Value) -> None:
        y = product(g, "first", x, 16 if pattern == "swiglu" else WIDTH)
        if pattern == "swiglu":
            g.output(g.call("swiglu", gate_up=y, ffn_width=8))
        elif pattern == "norm":
            g.output(norm(g, "next", y))
        else:
            if pattern == "finish":
                base = g.weight("base", ("draft/base",), (2, 2, WIDTH))
                delta = g.input("delta", (B, W, 2, 4), "float32")
                y = g.call("conv_finish", y=y, base=base, delta=delta, groups=4)
            out = g.call("residual_add", "residual", x=x, y=y)
            g.output(norm(g, "next", out))
        use(g, y)

    graph = declared(declare)
    assert combine(graph) is graph


@pytest.mark.parametrize("pattern", ["branch", "norm", "swiglu"])
def test_products_over_all_rows_keep_their_ops(pattern: str) -> None:
    def declare(g: GraphBuilder, x: Value) -> None:
        y = product(g, "first", x, 16 if pattern == "swiglu" else WIDTH, tiled=False)
        if pattern == "swiglu":
            g.output(g.call("swiglu", gate_up=y, ffn_width=8))
        else:
            out = g.call("residual_add", x=x, y=y) if pattern == "branch" else y
            g.output(norm(g, "next", out))

    graph = declared(declare)
    assert combine(graph) is graph


def changed(declare: Declare, name: str, **attributes: Any) -> Graph:
    """A declared graph of which one node has other attributes."""
    graph = declared(declare)
    nodes = [
        Node(n.name, n.op, n.region, n.inputs, n.outputs, {**n.attributes, **attributes})
        if n.name.endswith(name)
        else n
        for n in graph.nodes
    ]
    assert nodes != list(graph.nodes)
    return Graph(graph.key, nodes, graph.values)


@pytest.mark.parametrize("name", ["linear_attn.qkv", "linear_attn.z", "linear_attn.b_a"])
def test_a_delta_net_of_which_one_product_is_not_tiled(name: str) -> None:
    graph = changed(delta_net, name, tiled=False)
    assert combine(graph) is graph


def test_a_ring_whose_product_is_not_tiled_stays_apart() -> None:
    found = combine(changed(rings, "context.1/kv", tiled=False))
    assert ops(found) == ["context_kv", "ring_append", "context_rings"]
    assert only(found, "context_rings").inputs["weights"] == ("kv.0", "kv.2")


def test_rings_of_other_heads_stay_apart() -> None:
    found = combine(changed(rings, "context.1/kv", eps=1e-5))
    assert ops(found) == ["context_rings", "context_rings"]
    assert [node.attributes["layers"] for node in found.nodes] == [1, 2]


@pytest.mark.parametrize("argument", ["residual", "both"])
def test_a_product_that_is_the_residual_itself(argument: str) -> None:
    def declare(g: GraphBuilder, x: Value) -> None:
        y = product(g, "first", x)
        out = g.call("residual_add", x=y, y=x if argument == "residual" else y)
        g.output(norm(g, "next", out))

    graph = declared(declare)
    assert combine(graph) is graph


def test_a_sum_with_two_norms_keeps_its_ops() -> None:
    def declare(g: GraphBuilder, x: Value) -> None:
        out = g.call("residual_add", x=x, y=product(g, "first", x))
        for name in ("one", "two"):
            g.output(norm(g, name, out))

    graph = declared(declare)
    assert combine(graph) is graph


PAIRS = {
    "dflash2": ("target_dense_2x", "dflash2_g16"),
    "dflash": ("target_dense_3x", "dflash_mixed_w6"),
    "plain": ("target_dense_2x", None),
}


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_rounds(name: str, sampling: bool) -> None:
    """Segments still fit together, nothing of a pattern is left, and values that stay are the
    same."""
    target, draft = PAIRS[name]
    pair = ModelPair(
        read_target_geometry(GOLDEN / target),
        read_draft_geometry(GOLDEN / draft) if draft else None,
    )
    drafts = 3 if draft else 0
    graphs = declare_round(pair, "triton", draft_tokens=drafts, batch=2, sampling=sampling).segments
    found = [combine(graph) for graph in graphs]
    check_segments(found)
    counts = Counter(op for graph in found for op in ops(graph))
    for scaled in ("gdn_project", "swiglu_linear", "linear"):
        counts[scaled] += counts[f"scaled_{scaled}"]
    counts["linear_residual_norm"] += counts["linear_residual_scale"]
    for joint, replaced in REPLACED.items():
        if draft or joint not in ("linear_norm", "context_rings"):
            assert counts[joint], joint
        for op in replaced:
            # A full layer of a draft keeps its pages by the ops of the target.
            assert not counts[op] or (op == "context_kv" and counts["append_kv"]), op
    convs = counts["linear_conv_residual_norm"]
    assert convs == (2 * pair.draft.layers if name == "dflash2" else 0)
    layers = Counter(pair.target.layer_types)
    assert counts["gdn_mixer"] == counts["gdn_project"] == layers["linear_attention"]
    assert counts["gated_attention"] == layers["full_attention"]
    for before, after in zip(graphs, found, strict=True):
        for role in ("input", "state", "retained", "output"):
            stay = {value.name: value for value in others(after.by_role(role))}
            assert stay == {value.name: value for value in others(before.by_role(role))}, role
        parts = [
            Counter(part for v in graph.by_role("weight") for part in v.weight.parts)
            for graph in (before, after)
        ]
        assert parts[0] == parts[1]
