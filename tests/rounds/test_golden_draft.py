"""The drafts against the golden vectors: context, block forward, candidates, proposals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_graph.checkpoint import Checkpoint, draft_layout, target_layout
from dflash_graph.executors import Executor, compile_segments, new_arena
from dflash_graph.geometry import read_draft_geometry, read_target_geometry
from dflash_graph.graph import Backend, GraphBuilder, GraphKey, Value
from dflash_graph.models import dflash, dflash2
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.qwen3_5 import head_weight
from dflash_graph.state import Capacities, StatePools, plan_state
from dflash_graph.tensor import TensorSpec

DFLASH = ["dflash_mixed_w16", "dflash_mixed_w6", "dflash_causal_unset"]
DFLASH2 = ["dflash2_g16", "dflash2_g8"]
#: Absolute tolerances of the golden set's README, section 6.
INPUT, KEYS, VALUES, HIDDEN, LOGITS = 5e-5, 2e-4, 5e-5, 2e-4, 5e-4
BRANCH = {
    "branch_input": 5e-5,
    "finish_delta": 5e-5,
    "prepared": 2e-4,
    "branch_output": 2e-4,
    "finished": 3e-4,
}
LENGTH = 96


@dataclass
class DraftBench:
    """Graphs of a draft alone; features come from the golden set, so the host may be any target."""

    pair: ModelPair
    backend: Backend
    weights: dict[Any, Tensor]
    pools: StatePools
    capacities: Capacities

    @classmethod
    def load(cls, golden: Any, case: str, backend: Backend, causality: str) -> DraftBench:
        folder, _, facts = golden(case)
        host, _, _ = golden(facts["host"])
        target, draft = read_target_geometry(host), read_draft_geometry(folder)
        pair = ModelPair(target, draft, draft_causality=causality)  # type: ignore[arg-type]
        capacities = Capacities(1, 128)
        g = GraphBuilder(GraphKey("state", "eager", 15, 1, 16, "float32"))
        dflash.declare_state(g, draft, 16)
        pools = StatePools(plan_state(g.build().by_role("state"), capacities))
        for pool in pools.tensors.values():
            pool.fill_(float("nan"))
        store = {
            "target": Checkpoint.open(host, target_layout(target)),
            "draft": Checkpoint.open(folder, draft_layout(draft)),
        }
        bench = cls(pair, backend, {}, pools, capacities)
        graphs = [bench.context_graph(), bench.block_graph(2)]
        for graph in graphs:
            for value in graph.by_role("weight"):
                assert value.weight is not None
                parts = [part.split("/", 1) for part in value.weight.parts]
                stacked = torch.cat([store[who].tensor(name) for who, name in parts])
                bench.weights[value.weight] = stacked
        return bench

    def context_graph(self) -> Any:
        draft = self.pair.draft
        assert draft is not None
        g = GraphBuilder(GraphKey("prefill", self.backend, 0, 1, LENGTH, "float32"))
        features = g.input("features", (1, LENGTH, draft.feature_width), "float32")
        inputs = dflash.ContextInputs(
            positions=g.input("positions", (1, 1, LENGTH)),
            slots=g.input("slots", (1,)),
            page_table=g.input("page_table", (1, "request_pages")),
            start=g.input("start", (1,)),
            live=g.input("live", (1,)),
        )
        with g.region("context"):
            dflash.declare_context(g, draft, features, inputs, tiled=True)
            g.retain(_named(g, "context/hidden_norm", (1, LENGTH, draft.hidden)))
        return _used(g)

    def block_graph(self, columns: int) -> Any:
        draft = self.pair.draft
        assert draft is not None
        g = GraphBuilder(GraphKey("forward", self.backend, columns - 1, 1, columns, "float32"))
        inputs = dflash.BlockInputs(
            anchor=g.input("anchor", (1,)),
            positions=g.input("positions", (1, 1, columns)),
            slots=g.input("slots", (1,)),
            page_table=g.input("page_table", (1, "request_pages")),
            frontier=g.input("frontier", (1,)),
            live=g.input("live", (1,)),
        )
        propose = dflash2.declare_proposal if draft.conv else dflash.declare_proposal
        with g.region("propose"):
            g.output(propose(g, self.pair, inputs, None).drafts)
            hidden = _named(g, "propose/final_norm", (1, columns, draft.hidden))
            head = head_weight(g, self.pair.target)
            scores = g.call(
                "head_scores", x=hidden, weight=head, multiplier=1.0, softcap=0.0, tiled=True
            )
            g.retain(scores)
            g.retain(hidden)
            if draft.selector:
                g.retain(
                    _named(
                        g,
                        "propose/select/head_topk.ids",
                        (1, columns - 1, draft.selector.top_k),
                        "int32",
                    )
                )
                g.retain(
                    _named(
                        g, "propose/select/head_topk.scores", (1, columns - 1, draft.selector.top_k)
                    )
                )
                g.retain(
                    _named(g, "propose/select/hidden_projection", (1, columns, draft.selector.rank))
                )
                g.output(_named(g, "propose/select/selector_walk.ranks", (1, columns - 1), "int32"))
        return _used(g)

    def run(self, graph: Any, **fields: Any) -> tuple[Executor, dict[str, Tensor]]:
        compiled = compile_segments([graph], self.capacities)
        executor = Executor(
            compiled,
            new_arena([compiled.plan], "cpu"),
            self.weights,
            self.pools.tensors,
            self.backend,
        )
        fields = {"slots": [0], "page_table": [[1, 0]], **fields}
        executor.inputs.fill(**{k: v for k, v in fields.items() if k in executor.inputs})
        stored: dict[str, Tensor] = {}
        executor.run(0, lambda _, values: stored.update({k: v.clone() for k, v in values.items()}))
        return executor, stored


def _named(g: GraphBuilder, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Value:
    return Value(name, TensorSpec(shape, dtype), "scratch")


def _used(g: GraphBuilder) -> Any:
    """The graph without frame fields that this draft does not read (a draft has rings, pages, or
    both).
    """
    whole = g.build()
    read = {name for node in whole.nodes for _, name in node.operands()}
    return type(whole)(
        whole.key,
        whole.nodes,
        {k: v for k, v in whole.values.items() if k in read or v.role != "input"},
    )


@pytest.mark.parametrize("case", DFLASH + DFLASH2)
def test_context(case: str, backend: Any, golden: Any, close: Any) -> None:
    _, expected, _ = golden(case)
    b = DraftBench.load(golden, case, backend, "none")
    draft = b.pair.draft
    assert draft is not None
    _, stored = b.run(
        b.context_graph(),
        features=expected["context_features"][None],
        positions=[[list(range(LENGTH))]],
        start=[0],
        live=[LENGTH],
    )
    close(stored["context/hidden_norm"][0], expected["context_input"], INPUT, "context_input")
    for layer, kind in enumerate(draft.layer_types):
        for side, tolerance in (("k", KEYS), ("v", VALUES)):
            whole = expected[f"context_{side}.{layer}"]  # [G, 96, D]
            if kind == "full_attention":
                pages = b.pools.tensors[f"draft.layers.{layer}.{side}_pages"][[1, 0]]
                mine = pages.permute(1, 0, 2, 3).reshape(whole.shape[0], -1, whole.shape[2])[
                    :, :LENGTH
                ]
                close(mine, whole, tolerance, f"context_{side}.{layer}")
            else:
                assert draft.window is not None
                live = list(range(LENGTH - draft.window, LENGTH))
                ring = b.pools.tensors[f"draft.layers.{layer}.{side}_ring"][0]
                mine = ring[[p % draft.window for p in live]].transpose(0, 1)
                close(mine, whole[:, live], tolerance, f"context_{side}.{layer}")


def blocks_of(facts: dict[str, Any], backend: str) -> list[int]:
    """Widths to run: all eagerly; compiled, the default block and the widest."""
    return list(facts["widths"]) if backend == "eager" else [w for w in facts["widths"] if w >= 8]


@pytest.mark.parametrize(
    ("case", "causality", "prefix"),
    [
        *((case, "none", "") for case in DFLASH[:2] + DFLASH2),
        ("dflash_causal_unset", "sliding", ""),
        ("dflash_causal_unset", "none", "noncausal."),
    ],
)
def test_block(
    case: str, causality: str, prefix: str, backend: Any, golden: Any, close: Any
) -> None:
    _, expected, facts = golden(case)
    ids = expected["sequence_ids"].tolist()
    b = DraftBench.load(golden, case, backend, causality)
    draft = b.pair.draft
    assert draft is not None
    ran = 0
    for frontier in facts["frontiers"]:
        b.run(
            b.context_graph(),
            features=expected["context_features"][None],
            positions=[[list(range(LENGTH))]],
            start=[0],
            live=[frontier],
        )
        for width in blocks_of(facts, backend):
            name = f"F{frontier}.W{width}."
            if name + prefix + "hidden" not in expected:
                continue
            ran += 1
            executor, stored = b.run(
                b.block_graph(width),
                anchor=[ids[frontier]],
                positions=[[list(range(frontier, frontier + width))]],
                frontier=[frontier],
                live=[width],
            )
            name += prefix
            close(
                stored["propose/final_norm"][0], expected[name + "hidden"], HIDDEN, name + "hidden"
            )
            close(
                stored["propose/head_scores"][0, 1:],
                expected[name + "logits"],
                LOGITS,
                name + "logits",
            )
            if draft.kind == "dflash":
                found = executor.outputs["propose/head_argmax.ids"][0]
                assert found.tolist() == expected[name + "argmax"].tolist(), name
            else:
                _check_selector(executor, stored, expected, name, close)
                if backend == "eager":
                    _check_branches(stored, expected, name, close)
    assert ran >= len(facts["frontiers"]), "every frontier has at least one width"


def _check_selector(
    executor: Executor,
    stored: dict[str, Tensor],
    expected: dict[str, Tensor],
    name: str,
    close: Any,
) -> None:
    ids = stored["propose/select/head_topk.ids"][0]
    assert ids.tolist() == expected[name + "topk_ids"].tolist(), name
    close(
        stored["propose/select/head_topk.scores"][0],
        expected[name + "topk_unary"],
        LOGITS,
        name + "topk_unary",
    )
    close(
        stored["propose/select/hidden_projection"][0, 1:],
        expected[name + "hidden_projection"],
        HIDDEN,
        name + "hidden_projection",
    )
    drafts = executor.outputs["propose/select/selector_walk.drafts"][0]
    ranks = executor.outputs["propose/select/selector_walk.ranks"][0]
    assert drafts.tolist() == expected[name + "greedy.path"].tolist(), name
    assert ranks.tolist() == expected[name + "greedy.index"].tolist(), name


def _check_branches(
    stored: dict[str, Tensor], expected: dict[str, Tensor], name: str, close: Any
) -> None:
    """Both sides of the grouped dynamic convolution around the first layer's sublayers."""
    for branch, region, output in (("attention", "attention", "o"), ("mlp", "ffn", "down")):
        found = {
            "branch_input": stored[f"propose/layer.0/{region}/norm"],
            "prepared": stored[f"propose/layer.0/{region}/conv_prepare.prepared"],
            "finish_delta": stored[f"propose/layer.0/{region}/conv_prepare.delta"],
            "branch_output": stored[f"propose/layer.0/{region}/{output}"],
            "finished": stored[f"propose/layer.0/{region}/conv_finish"],
        }
        for what, value in found.items():
            key = f"{name}layer0.{branch}.{what}"
            close(value[0], expected[key], BRANCH[what], key)
