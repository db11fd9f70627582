"""A round joins target and draft: a forward segment (materialize, propose, verify, accept) and a
finish segment.

Plain decoding is the same declaration with `draft_tokens = 0`: one column, nothing proposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dflash_graph.errors import OptionError
from dflash_graph.graph import Backend, Graph, GraphBuilder, GraphKey, Value
from dflash_graph.models import dflash, dflash2
from dflash_graph.models.dflash import Proposal, SamplingInputs
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.qwen3_5 import (
    Records,
    TargetInputs,
    TargetOutputs,
    continuation_hidden,
    declare_pass,
    gdn_state,
    head_weight,
)
from dflash_graph.models.qwen3_5 import declare_state as declare_target_state
from dflash_graph.philox import Purpose

_PROPOSALS = {"dflash": dflash.declare_proposal, "dflash2": dflash2.declare_proposal}


@dataclass(frozen=True)
class Round:
    """The two segments of a round for one `(K, B, backend)`; they share retained values by name."""

    forward: Graph
    finish: Graph

    @property
    def segments(self) -> tuple[Graph, Graph]:
        return (self.forward, self.finish)


def declare_round(
    pair: ModelPair,
    backend: Backend,
    *,
    draft_tokens: int,
    batch: int,
    sampling: bool = False,
    given_drafts: bool = False,
    scores: bool = False,
) -> Round:
    """Declare a round.

    Args:
        pair: target and draft; without a draft nothing proposes, so `draft_tokens` must be 0 or
            drafts given.
        backend: the lowering it is meant for.
        draft_tokens: K, 0..15.
        batch: B, 1..8.
        sampling: every row has its own temperature, filters, penalties and seed in the frame,
            greedy rows among them; otherwise all rows are greedy without penalties, and no scores
            are kept.
        given_drafts: proposals stand in the frame (`drafts`, `[B, K]`) instead of coming from the
            draft: for proposers of one's own, and for tests that force an acceptance.
        scores: also retain the head's scores of every column, `verify/scores` float32 `[B, W, V]`.

    Raises:
        OptionError: K or B is out of range, or there is nothing to propose K > 0 drafts.
        UnsupportedModelError: the target has no graph yet.
    """
    if not 0 <= draft_tokens <= 15:
        raise OptionError(f"draft_tokens: expected 0..15, got {draft_tokens}")
    if not 1 <= batch <= 8:
        raise OptionError(f"batch: expected 1..8, got {batch}")
    if draft_tokens and pair.draft is None and not given_drafts:
        raise OptionError(
            f"draft_tokens: expected 0 (no draft, no given drafts), got {draft_tokens}"
        )
    columns = draft_tokens + 1
    g = pair.builder("forward", backend, draft_tokens=draft_tokens, batch=batch, columns=columns)
    outputs = _declare_forward(g, pair, sampling=sampling, given_drafts=given_drafts, scores=scores)
    forward = g.build()
    return Round(forward, _declare_finish(pair, forward, outputs, sampling=sampling))


def declare_prefill(
    pair: ModelPair, backend: Backend, *, tokens: int, embeddings: bool = False
) -> Graph:
    """Declare a prefill chunk of one request: up to `tokens` columns, committed as they are
    computed.

    Their features go straight into the draft's context, and the last live column's hidden becomes
    the continuation hidden.
    """
    g = pair.builder("prefill", backend, draft_tokens=0, batch=1, columns=tokens)
    inputs = TargetInputs(
        ids=g.input("ids", (1, tokens)),
        positions=g.input("positions", (3, 1, tokens)),
        slots=g.input("slots", (1,)),
        page_table=g.input("page_table", (1, "request_pages")),
        start=g.input("frontier", (1,)),
        live=g.input("live_columns", (1,)),
    )
    if embeddings:
        shape = (1, tokens, pair.target.hidden)
        given = g.input("embeddings", shape, "float32")
        inputs = replace(inputs, embeddings=given, replaced=g.input("replaced", (1, tokens)))
    blocks = pair.draft.target_layer_ids if pair.draft else ()
    with g.region("prefill"):
        outputs = declare_pass(g, pair.target, inputs, blocks=blocks, prefill=True)
        _stage_hidden(g, pair, outputs.hidden, inputs.slots, inputs.live)
    if pair.draft:
        with g.region("context"):
            features = g.call(
                "join_features",
                features=[outputs.blocks[layer] for layer in blocks],
                blocks=len(blocks),
            )
            where = dflash.ContextInputs(
                positions=g.input("context_positions", (1, 1, tokens)),
                slots=inputs.slots,
                page_table=inputs.page_table,
                start=inputs.start,
                live=inputs.live,
            )
            dflash.declare_context(g, pair.draft, features, where, tiled=False)
    return g.build()


def declare_first_token(pair: ModelPair, backend: Backend, *, sampling: bool = False) -> Graph:
    """Declare the choice of a request's first token from its continuation hidden."""
    g = pair.builder("first_token", backend, draft_tokens=0, batch=1, columns=1)
    with g.region("first_token"):
        hidden = g.call(
            "slot_hidden",
            continuation=continuation_hidden(g, pair.target),
            slots=g.input("slots", (1,)),
        )
        if sampling:
            # Column 0 only stands for the prompt's last token; nothing was proposed.
            where = _Place(g.input("slots", (1,)), g.input("frontier", (1,)))
            ids = g.call("block_ids", "ids", anchor=where.frontier, columns=1, mask_token_id=0)
            _accept_sampled(
                g,
                pair,
                ids,
                _scores(g, pair, hidden),
                where,
                g.input("live_drafts", (1,)),
                _sampling_inputs(g, 1),
                Purpose.PREFILL,
            )
        else:
            targets, best = _target_choice(g, pair, hidden)
            _accept(g, targets, targets, best, g.input("live_drafts", (1,)))
    return g.build()


def declare_catch_up(pair: ModelPair, backend: Backend, *, columns: int) -> Graph:
    """Declare the materialize segment alone, for one request: context catches up with the frontier.

    Needed before a checkpoint is taken, since pending features are no part of one.
    """
    g = pair.builder("catch_up", backend, draft_tokens=columns - 1, batch=1, columns=columns)
    _declare_materialize(
        g, pair, g.input("slots", (1,)), g.input("page_table", (1, "request_pages"))
    )
    return g.build()


def declare_startup(
    pair: ModelPair, backend: Backend, *, draft_tokens: int, max_batch: int, prefill_chunk: int
) -> dict[str, tuple[Graph, ...]]:
    """Declare everything a start-up compiles, by name: segments that share a plan and frames.

    Rounds come in two kinds: ``round B=n`` for batches of plain greedy rows, ``sampling B=n`` for
    any. `backend_of` says what the others are declared for.
    """
    small = backend_of("first_token", backend)
    segments: dict[str, tuple[Graph, ...]] = {}
    for batch in range(1, max_batch + 1):
        for name, sampling in (("round", False), ("sampling", True)):
            declared = declare_round(
                pair, backend, draft_tokens=draft_tokens, batch=batch, sampling=sampling
            )
            segments[f"{name} B={batch}"] = declared.segments
    for name, embeddings in (("prefill", False), ("prefill with embeddings", True)):
        served = backend_of("prefill", backend)
        chunk = declare_prefill(pair, served, tokens=prefill_chunk, embeddings=embeddings)
        segments[f"{name} {prefill_chunk}"] = (chunk,)
    segments["first token"] = (declare_first_token(pair, small),)
    segments["sampled first token"] = (declare_first_token(pair, small, sampling=True),)
    if draft_tokens:
        segments["catch-up"] = (declare_catch_up(pair, small, columns=draft_tokens + 1),)
    return segments


def backend_of(segment: str, backend: Backend) -> Backend:
    """What a start-up declares a segment for, where rounds are declared for `backend`.

    Prefill is declared for references: its products are large. So are the first token and catch-up,
    whose work is small, but for kernels, which serve them as they do rounds.
    """
    if segment in ("forward", "finish"):
        return backend
    return "triton" if backend == "triton" and segment != "prefill" else "eager"


def token_counts(g: GraphBuilder, pair: ModelPair) -> Value:
    """How often each request has generated each token, `[slots, V]`; what penalties read."""
    return g.state("target.token_counts", ("slots", pair.target.vocab), "int32")


def declare_state(pair: ModelPair, columns: int) -> tuple[Value, ...]:
    """Every state of a pair, also where its target has no graph yet; `columns` is W."""
    g = GraphBuilder(GraphKey("state", "eager", columns - 1, 1, columns, pair.dtype))
    declare_target_state(g, pair.target)
    token_counts(g, pair)
    if pair.draft:
        dflash.declare_state(g, pair.draft, columns)
    return g.build().by_role("state")


@dataclass(frozen=True)
class _Place:
    """Slot and frontier of each request."""

    slots: Value
    frontier: Value


def _sampling_inputs(g: GraphBuilder, batch: int) -> SamplingInputs:
    return SamplingInputs(
        temperature=g.input("temperature", (batch,), "float32"),
        top_k=g.input("top_k", (batch,)),
        top_p=g.input("top_p", (batch,), "float32"),
        min_p=g.input("min_p", (batch,), "float32"),
        presence=g.input("presence", (batch,), "float32"),
        frequency=g.input("frequency", (batch,), "float32"),
        seed=g.input("seed", (batch, 2)),
    )


def _declare_materialize(g: GraphBuilder, pair: ModelPair, slots: Value, page_table: Value) -> None:
    draft = pair.draft
    assert draft is not None
    batch, columns = g.key.batch, g.key.columns
    with g.region("materialize"):
        pending = dflash.pending_state(g, draft, columns)
        features = g.call("pending_features", pending=pending, slots=slots)
        where = dflash.ContextInputs(
            positions=g.input("context_positions", (1, batch, columns)),
            slots=slots,
            page_table=page_table,
            start=g.input("context_frontier", (batch,)),
            live=g.input("pending", (batch,)),
        )
        dflash.declare_context(g, draft, features, where, tiled=True)


def _declare_forward(
    g: GraphBuilder, pair: ModelPair, *, sampling: bool, given_drafts: bool, scores: bool
) -> TargetOutputs:
    batch, columns = g.key.batch, g.key.columns
    where = _Place(g.input("slots", (batch,)), g.input("frontier", (batch,)))
    page_table = g.input("page_table", (batch, "request_pages"))
    anchor = g.input("anchor", (batch,))
    live_drafts = g.input("live_drafts", (batch,))
    law = _sampling_inputs(g, batch) if sampling else None
    proposal: Proposal | None = None
    draft = pair.draft if g.key.draft_tokens else None
    if draft is not None:
        _declare_materialize(g, pair, where.slots, page_table)
    if given_drafts:
        proposal = Proposal(g.input("drafts", (batch, g.key.draft_tokens)))
    elif draft is not None:
        with g.region("propose"):
            start = dflash.BlockInputs(
                anchor=anchor,
                positions=g.input("draft_positions", (1, batch, columns)),
                slots=where.slots,
                page_table=page_table,
                frontier=where.frontier,
                live=g.input("draft_columns", (batch,)),
            )
            proposal = _PROPOSALS[draft.kind](g, pair, start, law)
    with g.region("verify"):
        if proposal is None:
            ids = g.call("block_ids", "ids", anchor=anchor, columns=1, mask_token_id=0)
        else:
            drafts = proposal.drafts
            ids = g.call("verify_ids", "ids", anchor=anchor, drafts=drafts, live_drafts=live_drafts)
        g.output(ids)
        inputs = TargetInputs(
            ids=ids,
            positions=g.input("positions", (3, batch, columns)),
            slots=where.slots,
            page_table=page_table,
            start=where.frontier,
            live=g.input("live_columns", (batch,)),
        )
        blocks = draft.target_layer_ids if draft is not None else ()
        outputs = declare_pass(g, pair.target, inputs, blocks=blocks)
        logits = _scores(g, pair, outputs.hidden) if scores or sampling else None
        choice = None if sampling else _target_choice(g, pair, outputs.hidden)
    with g.region("accept"):
        if choice is not None:
            _accept(g, ids, *choice, live_drafts)
        elif law is not None and logits is not None:
            _accept_sampled(g, pair, ids, logits, where, live_drafts, law, Purpose.PLAIN, proposal)
    for value in (outputs.hidden, *outputs.blocks.values(), *([logits] if scores else [])):
        assert value is not None
        g.retain(value)
    return outputs


def _declare_finish(
    pair: ModelPair, forward: Graph, outputs: TargetOutputs, *, sampling: bool
) -> Graph:
    key = forward.key
    g = pair.builder(
        "finish", key.backend, draft_tokens=key.draft_tokens, batch=key.batch, columns=key.columns
    )
    slots = g.input("slots", (key.batch,))
    committed = g.input("committed", (key.batch,))
    with g.region("commit"):
        for layer, record in outputs.records.items():
            with g.region(f"layer.{layer}"):
                _fold(g, pair, layer, record, slots, committed)
        if outputs.blocks:
            assert pair.draft is not None, "only a draft asks for features"
            features = [g.retained(outputs.blocks[layer]) for layer in pair.draft.target_layer_ids]
            g.call(
                "stage_features",
                features=features,
                pending=dflash.pending_state(g, pair.draft, key.columns),
                slots=slots,
                committed=committed,
                blocks=len(features),
            )
        _stage_hidden(g, pair, g.retained(outputs.hidden), slots, committed)
        if sampling:
            published = g.input("published", (key.batch, key.columns))
            counts = token_counts(g, pair)
            where = {"counts": counts, "slots": slots, "committed": committed}
            g.call("count_tokens", outputs=published, **where)
    return g.build()


def _fold(
    g: GraphBuilder, pair: ModelPair, layer: int, record: Records, slots: Value, committed: Value
) -> None:
    columns, k, v, beta, decay = (g.retained(value) for value in record.values())
    state, history = gdn_state(g, pair.target, layer)
    where = {"slots": slots, "committed": committed}
    g.call("gdn_fold", "fold", k=k, v=v, beta=beta, g=decay, state=state, **where)
    g.call("conv_history_commit", "history", columns=columns, history=history, **where)


def _stage_hidden(
    g: GraphBuilder, pair: ModelPair, hidden: Value, slots: Value, committed: Value
) -> None:
    continuation = continuation_hidden(g, pair.target)
    g.call(
        "stage_hidden", hidden=hidden, continuation=continuation, slots=slots, committed=committed
    )


def _target_choice(g: GraphBuilder, pair: ModelPair, hidden: Value) -> tuple[Value, Value]:
    choice: tuple[Value, Value] = g.call(
        "head_argmax",
        "choice",
        x=hidden,
        weight=head_weight(g, pair.target),
        skip=0,
        public_vocab=pair.emitted_vocab,
        multiplier=1.0,
        softcap=0.0,
    )
    return choice


def _accept(g: GraphBuilder, ids: Value, targets: Value, best: Value, live_drafts: Value) -> None:
    results = g.call(
        "accept_greedy",
        "greedy",
        ids=ids,
        targets=targets,
        scores=best,
        live_drafts=live_drafts,
    )
    for value in results:
        g.output(value)


def _scores(g: GraphBuilder, pair: ModelPair, hidden: Value) -> Value:
    head = head_weight(g, pair.target)
    call = {"x": hidden, "weight": head, "multiplier": 1.0, "softcap": 0.0, "tiled": True}
    value: Value = g.call("head_scores", "scores", **call)
    return value


def _accept_sampled(
    g: GraphBuilder,
    pair: ModelPair,
    ids: Value,
    scores: Value,
    where: _Place,
    live_drafts: Value,
    law: SamplingInputs,
    purpose: Purpose,
    proposal: Proposal | None = None,
) -> None:
    call: dict[str, Any] = {
        "ids": ids,
        "scores": scores,
        "counts": token_counts(g, pair),
        "slots": where.slots,
        "live_drafts": live_drafts,
        "frontier": where.frontier,
        "public_vocab": pair.emitted_vocab,
        **{name: getattr(law, name) for name in law.__dataclass_fields__},
    }
    if proposal is not None and proposal.candidates is not None:
        call |= {"candidates": proposal.candidates, "draft_probs": proposal.draft_probs}
        results = g.call("accept_sparse", "sampled", **call)
    else:
        results = g.call("accept_one_hot", "sampled", purpose=int(purpose), **call)
    for value in results:
        g.output(value)
