"""The DFlash2 proposal: candidates from the head, then a conditional walk through them (spec
section 3).

The block forward, with its grouped dynamic convolution, is declared in `dflash`.
"""

from __future__ import annotations

from dflash_graph.graph import GraphBuilder, Value
from dflash_graph.models.dflash import BlockInputs, declare_block, head_attributes
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.qwen3_5 import head_weight


def declare_proposal(g: GraphBuilder, pair: ModelPair, inputs: BlockInputs) -> Value:
    """DFlash2: the selector's path through the candidates of every mask column, `[B, K]` ids."""
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
        projected = g.call("linear", "hidden_projection", x=hidden, weight=projection, tiled=True)
        codebooks = {
            side: g.weight(
                f"draft.candidate_selector.{side}_codebook",
                (f"draft/candidate_selector.{side}_codebook",),
                (vocab, rank),
            )
            for side in ("predecessor", "successor")
        }
        drafts, _ = g.call(
            "selector_walk",
            candidates=candidates,
            scores=scores,
            hidden=projected,
            anchor=inputs.anchor,
            **codebooks,
        )
    drafted: Value = drafts
    return drafted
