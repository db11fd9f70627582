"""The DFlash2 proposal: candidates from the head, then a conditional walk through them (spec
section 3).

The block forward, with its grouped dynamic convolution, is declared in `dflash`.
"""

from __future__ import annotations

from dflash_graph.graph import GraphBuilder
from dflash_graph.models.dflash import (
    BlockInputs,
    Proposal,
    SamplingInputs,
    declare_block,
    head_attributes,
)
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.qwen3_5 import head_weight


def declare_proposal(
    g: GraphBuilder, pair: ModelPair, inputs: BlockInputs, sampling: SamplingInputs | None
) -> Proposal:
    """DFlash2: the selector's path through the candidates of every mask column.

    With `sampling` the path is drawn and q stays sparse, `[B, K, C]`; without, it is the greedy
    path.
    """
    draft = pair.draft
    assert draft is not None and draft.selector is not None
    rank, vocab = draft.selector.rank, pair.target.vocab
    hidden = declare_block(g, pair, inputs)
    with g.region("select"):
        candidates, scores = g.call(
            "head_topk",
            x=hidden,
            weight=head_weight(g, pair.target),
            skip=1,
            top_k=draft.selector.top_k,
            **head_attributes(pair),
        )
        projection = g.weight(
            "draft.candidate_selector.hidden_projection",
            ("draft/candidate_selector.hidden_projection.weight",),
            (rank, draft.hidden),
        )
        walk = {
            "candidates": candidates,
            "scores": scores,
            "hidden": g.call(
                "linear", "hidden_projection", x=hidden, weight=projection, tiled=True
            ),
            "anchor": inputs.anchor,
        }
        for side in ("predecessor", "successor"):
            name = f"candidate_selector.{side}_codebook"
            walk[side] = g.weight(f"draft.{name}", (f"draft/{name}",), (vocab, rank))
        if sampling is None:
            drafts, _ = g.call("selector_walk", **walk)
            return Proposal(drafts)
        drafts, _, draft_probs = g.call(
            "selector_sample",
            temperature=sampling.temperature,
            seed=sampling.seed,
            frontier=inputs.frontier,
            **walk,
        )
        return Proposal(drafts, candidates, draft_probs)
