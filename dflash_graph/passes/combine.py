"""combine: ops that one kernel computes become one op.

Before: a declared graph. After: for the backend ``triton``, each pattern below is one node; for
others the graph as it is. A pattern is taken only where nothing else reads what would no longer be
stored. Values that outlive it (records, features) keep their names, so the segments of a round
still fit together, and the joint contract says what the ops said one by one. One record changes: of
v and beta a fold needs the correction that verify made of them, which stands in their place.

    linear [conv_finish] residual_add rms_norm      linear_residual_norm, linear_conv_residual_norm
    linear rms_norm                                 linear_norm
    linear swiglu                                   swiglu_linear
    linear linear linear gdn_conv gdn_gates gdn_recurrence gated_norm     gdn_project, gdn_mixer
    head_norm_rope append_kv paged_attention attention_gate         rope_append, gated_attention
    context_kv ring_append, in every local layer    context_rings
    gdn_fold conv_history_commit, in every layer    gdn_commit
"""

from __future__ import annotations

from collections.abc import Mapping

from dflash_graph.graph import Graph, Node
from dflash_graph.op import Attribute
from dflash_graph.passes.rewrite import Rewrite
from dflash_graph.passes.row_scale import row_scale
from dflash_graph.tensor import TensorSpec

Inputs = Mapping[str, str | tuple[str, ...]]


def combine(graph: Graph) -> Graph:
    """The graph that the backend's kernels compute."""
    if graph.key.backend != "triton":
        return graph
    rewrite = Rewrite(graph)
    for node in graph.nodes:
        for pattern in (_delta_net, _attention, _branch_end, _normed_product, _swiglu):
            if pattern(rewrite, node):
                break
    _rings(rewrite)
    _commit(rewrite)
    return row_scale(rewrite.result())


def _place(node: Node) -> str:
    return node.region + "/" if node.region else ""


def _made(
    op: str,
    name: str,
    region: str,
    inputs: Inputs,
    outputs: Mapping[str, str],
    attributes: Mapping[str, Attribute],
) -> Node:
    return Node(name, op, region, dict(inputs), dict(outputs), dict(attributes))


def _one(node: Node, argument: str) -> str:
    name = node.inputs[argument]
    assert isinstance(name, str), f"{node.name}.{argument}: one value"
    return name


def _some(node: Node, *arguments: str) -> dict[str, str | tuple[str, ...]]:
    return {argument: node.inputs[argument] for argument in arguments}


def _is_tiled_linear(node: Node) -> bool:
    return node.op == "linear" and node.attributes["tiled"] is True


def _branch_end(rewrite: Rewrite, linear: Node) -> bool:
    """linear [conv_finish] residual_add rms_norm."""
    if not _is_tiled_linear(linear):
        return False
    value = linear.outputs["y"]
    finish = rewrite.only_reader(value, "conv_finish")
    if finish is not None:
        value = finish.outputs["out"]
    add = rewrite.only_reader(value, "residual_add")
    if add is None or add.inputs["y"] != value:
        return False
    norms = rewrite.readers(add.outputs["out"], "rms_norm")
    if len(norms) != 1:
        return False
    (norm,) = norms
    inputs = {
        "y": linear.inputs["x"],
        "weight": linear.inputs["weight"],
        **(_some(finish, "base", "delta") if finish else {}),
        "x": add.inputs["x"],
        "norm": norm.inputs["weight"],
    }
    attributes = {**(finish.attributes if finish else {}), **norm.attributes}
    node = _made(
        "linear_conv_residual_norm" if finish else "linear_residual_norm",
        linear.name,
        linear.region,
        inputs,
        {"out": add.outputs["out"], "n": norm.outputs["y"]},
        attributes,
    )
    # At the sum, which others may read before the norm.
    rewrite.replace([linear, *([finish] if finish else []), add, norm], [node], add)
    return True


def _normed_product(rewrite: Rewrite, linear: Node) -> bool:
    """linear rms_norm."""
    if not _is_tiled_linear(linear):
        return False
    norm = rewrite.only_reader(linear.outputs["y"], "rms_norm")
    if norm is None:
        return False
    inputs = {**linear.inputs, "norm": norm.inputs["weight"]}
    outputs = {"n": norm.outputs["y"]}
    node = _made("linear_norm", linear.name, linear.region, inputs, outputs, norm.attributes)
    rewrite.replace([linear, norm], [node])
    return True


def _swiglu(rewrite: Rewrite, linear: Node) -> bool:
    """linear swiglu."""
    if not _is_tiled_linear(linear):
        return False
    act = rewrite.only_reader(linear.outputs["y"], "swiglu")
    if act is None:
        return False
    outputs = {"y": act.outputs["y"]}
    node = _made(
        "swiglu_linear", linear.name, linear.region, linear.inputs, outputs, act.attributes
    )
    rewrite.replace([linear, act], [node])
    return True


def _delta_net(rewrite: Rewrite, first: Node) -> bool:
    """linear linear linear gdn_conv gdn_gates gdn_recurrence gated_norm."""
    if not _is_tiled_linear(first):
        return False
    convs = rewrite.readers(first.outputs["y"], "gdn_conv")
    if len(convs) != 1:
        return False
    (conv,) = convs
    recurrence = rewrite.only_reader(conv.outputs["q"], "gdn_recurrence")
    if recurrence is None:
        return False
    gates = rewrite.producer(_one(recurrence, "g"), "gdn_gates")
    norm = rewrite.only_reader(recurrence.outputs["y"], "gated_norm")
    if gates is None or norm is None:
        return False
    third = rewrite.producer(_one(gates, "ba"), "linear")
    second = rewrite.producer(_one(norm, "z"), "linear")
    if second is None or third is None:
        return False
    linears = (first, second, third)
    if len({str(n.inputs["x"]) for n in linears}) != 1 or not all(map(_is_tiled_linear, linears)):
        return False
    if rewrite.only_reader(third.outputs["y"], "gdn_gates") is None:
        return False
    if rewrite.only_reader(second.outputs["y"], "gated_norm") is None:
        return False
    region, place = first.region, _place(first)
    weights = [rewrite.values[_one(node, "weight")] for node in linears]
    widths = [int(value.spec.shape[0]) for value in weights]
    stacked = rewrite.weight(
        weights[0].name.rpartition(".")[0] + ".in_proj",
        [part for value in weights if value.weight for part in value.weight.parts],
        TensorSpec((sum(widths), weights[0].spec.shape[1]), weights[0].spec.dtype),
    )
    columns, z, ba = first.outputs["y"], second.outputs["y"], third.outputs["y"]
    heads = norm.attributes["value_heads"]
    project = _made(
        "gdn_project",
        f"{place}project",
        region,
        {"x": first.inputs["x"], "weight": stacked},
        {"columns": columns, "z": z, "ba": ba},
        {"channels": widths[0], "value_width": widths[1], "heads": heads},
    )
    mixer = _made(
        "gdn_mixer",
        recurrence.name,
        recurrence.region,
        {
            "x": columns,
            "taps_weight": conv.inputs["weight"],
            "history": conv.inputs["history"],
            "ba": ba,
            **_some(gates, "a_log", "dt_bias"),
            "z": z,
            "norm": norm.inputs["weight"],
            **_some(recurrence, "state", "slots", "live"),
        },
        {
            "out": norm.outputs["out"],
            "k": conv.outputs["k"],
            "u": rewrite.correction(conv.outputs["v"]),
            "g": gates.outputs["g"],
        },
        {**conv.attributes, "eps": norm.attributes["eps"]},
    )
    rewrite.replace((*linears, conv, gates, recurrence, norm), (project, mixer))
    return True


def _attention(rewrite: Rewrite, rope: Node) -> bool:
    """head_norm_rope append_kv paged_attention attention_gate."""
    if rope.op != "head_norm_rope":
        return False
    append = rewrite.only_reader(rope.outputs["k"], "append_kv")
    attention = rewrite.only_reader(rope.outputs["q"], "paged_attention")
    if append is None or attention is None:
        return False
    gate = rewrite.only_reader(attention.outputs["o"], "attention_gate")
    if gate is None or rewrite.only_reader(rope.outputs["v"], "append_kv") is not append:
        return False
    pages = _some(append, "k_pages", "v_pages", "page_table", "start", "live")
    if pages != _some(attention, *pages):
        return False
    q = {"q": rope.outputs["q"]}
    turned = _made(
        "rope_append", rope.name, rope.region, {**rope.inputs, **pages}, q, rope.attributes
    )
    attended = _made(
        "gated_attention",
        attention.name,
        attention.region,
        {**attention.inputs, "qkv": gate.inputs["qkv"]},
        {"y": gate.outputs["y"]},
        gate.attributes,
    )
    rewrite.replace((rope, append, attention, gate), (turned, attended))
    return True


def _rings(rewrite: Rewrite) -> None:
    """context_kv ring_append, in every local layer."""
    found: dict[tuple[str, ...], list[tuple[Node, Node]]] = {}
    for kv in rewrite.left("context_kv"):
        append = rewrite.only_reader(kv.outputs["k"], "ring_append")
        if append is None or rewrite.only_reader(kv.outputs["v"], "ring_append") is not append:
            continue
        if kv.attributes["tiled"] is not True:
            continue
        shared = [_one(kv, name) for name in ("c", "cos", "sin")]
        shared += [_one(append, name) for name in ("slots", "start", "live")]
        shared.append(str(sorted(kv.attributes.items())))
        found.setdefault(tuple(shared), []).append((kv, append))
    for index, pairs in enumerate(found.values()):
        kv, append = pairs[0]
        region = kv.region.rpartition("/")[0]
        label = f"rings.{index + 1}" if index else "rings"
        node = _made(
            "context_rings",
            f"{region}/{label}" if region else label,
            region,
            {
                "c": kv.inputs["c"],
                "weights": tuple(_one(k, "weight") for k, _ in pairs),
                "k_norms": tuple(_one(k, "k_norm") for k, _ in pairs),
                **_some(kv, "cos", "sin"),
                "k_rings": tuple(_one(a, "k_ring") for _, a in pairs),
                "v_rings": tuple(_one(a, "v_ring") for _, a in pairs),
                **_some(append, "slots", "start", "live"),
            },
            {},
            {
                "layers": len(pairs),
                **{name: kv.attributes[name] for name in kv.attributes if name != "tiled"},
            },
        )
        rewrite.replace([node for pair in pairs for node in pair], [node])


def _commit(rewrite: Rewrite) -> None:
    """gdn_fold conv_history_commit, in every layer."""
    folds, moves = rewrite.left("gdn_fold"), rewrite.left("conv_history_commit")
    by_region = {move.region: move for move in moves}
    shared = {(_one(node, "slots"), _one(node, "committed")) for node in (*folds, *moves)}
    is_paired = len(folds) == len(by_region) and {fold.region for fold in folds} == by_region.keys()
    if len(shared) != 1 or len(moves) != len(folds) or not is_paired:
        return
    pairs = [(fold, by_region[fold.region]) for fold in folds]
    lists = {
        "columns": tuple(_one(move, "columns") for _, move in pairs),
        "k": tuple(_one(fold, "k") for fold, _ in pairs),
        "u": tuple(rewrite.correction(_one(fold, "v")) for fold, _ in pairs),
        "g": tuple(_one(fold, "g") for fold, _ in pairs),
        "states": tuple(_one(fold, "state") for fold, _ in pairs),
        "histories": tuple(_one(move, "history") for _, move in pairs),
    }
    region = folds[0].region.partition("/")[0]
    node = _made(
        "gdn_commit",
        f"{region}/fold",
        region,
        {**lists, **_some(folds[0], "slots", "committed")},
        {},
        {"layers": len(pairs)},
    )
    rewrite.replace([node for pair in pairs for node in pair], [node])
