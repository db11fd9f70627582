"""scheduler: which requests hold slots and pages, and how a step moves them on.

A step admits waiting requests, prefills one chunk, and runs one round over every decoding request,
as an exact, compact batch. The order within a round is always preview, model commit, accounting,
publication: until the commit nothing of a request has changed, so a round that is interrupted
before it is as if it had not been. A scheduler knows nothing of threads; its engine lets one caller
in at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dflash_graph.contexts import Checkpoint, Coverage, PrefixCache, coverage_of
from dflash_graph.errors import DFlashGraphError, NonFiniteLogitsError, RequestError
from dflash_graph.executors import Executor, RoundExecutor
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.request import Event, Request
from dflash_graph.rounds import Rounds
from dflash_graph.state import FreeList
from dflash_graph.statistics import FinishReason, RoundRecord, Statistics


class Choice(NamedTuple):
    """What a round may publish of a request: N, and why it ends there, if it does."""

    kept: int
    reason: FinishReason | None = None
    error: DFlashGraphError | None = None


class Scheduler:
    """Requests over the executors and the state of one engine.

    Args:
        rounds: compiled executors.
        meanwhile: what the host does shortly before a device has finished a round; called with the
            batch size and whether all of it is greedy.
    """

    def __init__(
        self,
        rounds: Rounds,
        meanwhile: Callable[[int, bool], object] | None = None,
    ) -> None:
        self.rounds = rounds
        self._meanwhile = meanwhile
        self.slots = FreeList("slot", rounds.capacities.slots)
        self.pages = FreeList("page", rounds.capacities.bindings()["pages"])
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        #: Requests whose cancellation waits for its turn.
        self.leaving: deque[Request] = deque()
        #: Whether a preview runs: the one moment within a step in which requests may end.
        self.is_previewing = False
        #: What was published, and every end, since an engine last took them.
        self.events: list[Event] = []
        self.prefixes = PrefixCache(rounds.options.prefix_cache_bytes)
        self.statistics = Statistics()
        self._coverage: Coverage | None = None
        self._columns = np.arange(rounds.columns, dtype=np.int32)

    def owns(self, request: Request) -> bool:
        """Whether a request waits or runs here."""
        return request in self.active or request in self.waiting

    def advance(self) -> None:
        """One step. What fails before a request has its first token ends that request alone."""
        self.leave()
        self._admit()
        prefilling = next((r for r in self.active if r.is_prefilling), None)
        if prefilling is not None:
            with self._failing_alone(prefilling, "prefill"):
                self._prefill(prefilling)
            self._store_prefix(prefilling)
        decoding = [r for r in self.active if r.is_decoding]
        if decoding:
            self._round(decoding)

    def leave(self) -> None:
        """End the requests whose cancellation waits."""
        while self.leaving:
            request = self.leaving.popleft()
            if not request.is_finished and self.owns(request):
                self.end(request, "cancelled")

    def _admit(self) -> None:
        """Give waiting requests slots; one whose admission was interrupted has its slot already."""
        while self.waiting and (self.waiting[0].is_admitted or self.slots.free):
            request = self.waiting[0]
            with self._failing_alone(request, "admission"):
                if not request.is_admitted:
                    request.slot = self.slots.take()
                self._install(request)
                if request not in self.active:
                    self.active.append(request)
                self.waiting.popleft()

    @contextmanager
    def _failing_alone(self, request: Request, stage: str) -> Iterator[None]:
        """What is raised here ends the request, and is its error's cause."""
        try:
            yield
        except Exception as cause:
            self._fail(request, f"its {stage} failed ({cause!r})", cause)

    def _fail(self, request: Request, what: str, cause: BaseException) -> None:
        """End a request with an error, if it has not ended."""
        if not request.is_finished:
            request.error = RequestError(f"request {request.id}: {what}")
            request.error.__cause__ = cause
            self.end(request, "error")

    def _install(self, request: Request) -> None:
        """Put a request's starting state into its slot: a context's, a stored prefix's, or none."""
        state = self.rounds.state
        state.reset_slot(request.slot)
        request.frontier = request.context_frontier = 0
        base = request.source
        if base is None and request.media is None:
            base = self.prefixes.longest(request.prompt)
        if base is not None:
            self._reserve(request, base.frontier)
            state.load_image(base.images, request.slot, request.pages)
            request.frontier = request.context_frontier = base.frontier
        if request.source is None:
            # A prompt that starts again counts once.
            self.statistics.prefix_tokens += request.frontier - request.reused
            request.reused = request.frontier
        if not request.is_plain_greedy:
            state.count(request.slot, request.generated)

    def _prefill(self, request: Request) -> None:
        """Process the next chunk of a prompt; after the last one, choose the first token."""
        # The whole prompt is processed already if choosing the first token was interrupted.
        if request.frontier < len(request.prompt):
            try:
                self._prefill_chunk(request)
            except BaseException as error:
                if not isinstance(error, Exception):
                    # Some layers' state has moved on and others' has not: start the prompt again.
                    self._install(request)
                raise
        if request.frontier == len(request.prompt):
            self._choose_first(request)

    def _prefill_chunk(self, request: Request) -> None:
        start = request.frontier
        tokens = request.prompt[start : start + self.rounds.options.prefill_chunk]
        end = start + len(tokens)
        media = request.media
        rows = [i for i in (media.embeddings if media else ()) if start <= i < end]
        executor = self.rounds.prefill(len(tokens), embeddings=bool(rows))
        physical = executor.compiled.graphs[0].key.columns
        self._reserve(request, end)
        positions = list(range(start, start + physical))
        fields: dict[str, Any] = {
            "ids": [[*tokens, *[0] * (physical - len(tokens))]],
            "positions": [[positions]] * 3,
            "slots": [request.slot],
            "page_table": self._tables([request]),
            "frontier": [start],
            "live_columns": [len(tokens)],
        }
        if "context_positions" in executor.inputs:
            fields["context_positions"] = [[positions]]
        executor.inputs.fill(**fields)
        if media is not None:
            executor.inputs["positions"][:, 0, : len(tokens)] = media.positions[:, start:end]
        if media is not None and rows:
            executor.inputs.fill(embeddings=0, replaced=0)
            for row in rows:
                executor.inputs["embeddings"][0, row - start] = media.embeddings[row]
                executor.inputs["replaced"][0, row - start] = 1
        executor.run()
        request.frontier = request.context_frontier = end

    def _choose_first(self, request: Request) -> None:
        if request.is_plain_greedy:
            executor, law = self.rounds.first_token, "first_token/greedy"
        else:
            executor, law = self.rounds.first_sampled, "first_token/sampled"
            executor.inputs.fill(frontier=[request.frontier - 1], **_law_fields([request]))
        executor.inputs.fill(slots=[request.slot], live_drafts=[0])
        executor.run()
        token = int(executor.outputs[f"{law}.outputs"].item())
        if executor.outputs[f"{law}.finite"].item():
            choice = self._preview(request, [token])
        else:
            choice = _non_finite(request)
        if request.is_finished:
            return
        if choice.kept and not request.is_plain_greedy:
            self.rounds.state.count(request.slot, (*request.generated, token))
        try:
            self._publish(request, [token], choice)
        except BaseException as error:
            self._fail(request, f"its first token was interrupted ({error!r})", error)
            raise

    def _store_prefix(self, request: Request) -> None:
        """Keep the state of a prompt that was processed in this step, for prompts like it."""
        if self.prefixes.capacity and request.is_decoding and request.media is None:
            self.prefixes.store(self.take(request))

    def _round(self, batch: list[Request]) -> None:
        """One round over `batch`: forward, preview, commit, accounting, publication."""
        is_greedy = all(request.is_plain_greedy for request in batch)
        executor = self.rounds[len(batch)] if is_greedy else self.rounds.sampling[len(batch)]
        live_drafts = [self._live_drafts(request) for request in batch]
        meanwhile = self._meanwhile and partial(self._meanwhile, len(batch), is_greedy)
        fields = self._round_fields(executor, batch, live_drafts)
        outputs = executor.forward(fields, meanwhile=meanwhile)
        for request in batch:
            request.context_frontier = request.frontier  # materialize has caught up
        law = executor.law
        accepted = outputs.read(f"{law}.accepted")
        finite = outputs.read(f"{law}.finite")
        rows = outputs.read(f"{law}.outputs")
        choices = [
            self._preview(request, rows[index][: accepted[index] + 1])
            if finite[index]
            else _non_finite(request)
            for index, request in enumerate(batch)
        ]
        # Nothing is committed of a request that a preview cancelled.
        committed = [
            0 if request.is_finished else choice.kept
            for request, choice in zip(batch, choices, strict=True)
        ]
        left = dict(enumerate(batch))
        failure: BaseException | None = None
        try:
            executor.finish(committed)
            for index, request in enumerate(batch):
                licensed = accepted[index] + 1
                record = RoundRecord(
                    live_drafts[index], accepted[index], licensed, committed[index]
                )
                # Every row is accounted for, whatever another's checkpoint raises.
                try:
                    if not request.is_finished:
                        self._account(request, record, rows[index], choices[index])
                    del left[index]
                except BaseException as error:
                    failure = failure or error
        except BaseException as error:
            failure = error
        if failure is not None:
            # Of these, state and what is known of it may have parted.
            for request in left.values():
                self._fail(request, f"its commit was interrupted ({failure!r})", failure)
            raise failure

    def _account(
        self, request: Request, record: RoundRecord, outputs: list[int], choice: Choice
    ) -> None:
        request.frontier += record.committed
        request.rounds.append(record)
        self.statistics.add(record)
        self._publish(request, outputs, choice)

    def _round_fields(
        self, executor: RoundExecutor, batch: list[Request], live_drafts: list[int]
    ) -> dict[str, Any]:
        """Input frame of a round, and the pages its columns may be written to."""
        for request, live in zip(batch, live_drafts, strict=True):
            self._reserve(request, request.frontier + live + 1)
        frontier = [r.frontier for r in batch]
        ahead = np.array(frontier, dtype=np.int32)[:, None] + self._columns
        deltas = [r.rope_delta for r in batch]
        rotary = ahead + np.array(deltas, dtype=np.int32)[:, None] if any(deltas) else ahead
        live_columns = [live + 1 for live in live_drafts]
        fields: dict[str, Any] = {
            "slots": [r.slot for r in batch],
            "page_table": self._tables(batch),
            "anchor": [r.anchor for r in batch],
            "frontier": frontier,
            "live_drafts": live_drafts,
            "live_columns": live_columns,
            "positions": rotary[None].repeat(3, axis=0),
        }
        if "context_frontier" in executor.inputs:
            draft = self.rounds.model.pair.draft
            assert draft is not None, "only a draft has context"
            behind = [r.context_frontier for r in batch]
            # DFlash attends over its live columns, DFlash2 over all W (spec section 1).
            whole = draft.kind == "dflash2"
            fields |= {
                "context_frontier": behind,
                "pending": [r.pending for r in batch],
                "context_positions": (np.array(behind, np.int32)[:, None] + self._columns)[None],
                "draft_positions": ahead[None],
                "draft_columns": len(self._columns) if whole else live_columns,
            }
        if "temperature" in executor.inputs:
            fields |= _law_fields(batch)
        return fields

    def _live_drafts(self, request: Request) -> int:
        """P: no more drafts than the budget can use; the budget never exceeds the capacity."""
        return min(self.rounds.draft_tokens, request.remaining)

    def _preview(self, request: Request, licensed: list[int]) -> Choice:
        """N of a row and why it ends: stop tokens, the budget, then the frontend's own choice."""
        if request.is_finished:
            return Choice(0)
        kept = len(licensed)
        reason: FinishReason | None = None
        if not request.stops.isdisjoint(licensed):
            first = next(i for i, token in enumerate(licensed) if token in request.stops)
            kept, reason = first + 1, "stop"
        remaining = request.remaining
        if kept > remaining or (kept == remaining and reason is None):
            kept, reason = remaining, "length"
        if request.stop_text is not None:
            complete = request.stop_text.scan(licensed[:kept])
            if complete is not None:
                kept, reason = complete, "stop"
        if request.preview is None:
            return Choice(kept, reason)
        self.is_previewing = True
        try:
            chosen = request.preview(tuple(licensed[:kept]))
        except Exception as error:
            message = f"request {request.id}: its preview raised {error!r}"
            return Choice(0, "error", RequestError(message))
        finally:
            self.is_previewing = False
        if type(chosen) is not int or not 0 <= chosen <= kept:
            message = (
                f"request {request.id}: preview must return an integer 0..{kept}, got {chosen!r}"
            )
            return Choice(0, "error", RequestError(message))
        if chosen == kept:
            return Choice(kept, reason)
        return Choice(chosen, None if chosen else "stop")

    def _publish(self, request: Request, outputs: list[int], choice: Choice) -> None:
        """Account for the first N outputs and publish what may be; a choice with a reason ends."""
        tokens = outputs[: choice.kept]
        request.history.extend(tokens)
        if request.stop_text is not None:
            request.stop_text.commit(tokens)
        request.error = choice.error
        if choice.reason is not None:
            try:
                if choice.reason in ("stop", "length"):
                    self._keep(request)
            finally:
                self.end(request, choice.reason)
        elif ready := self._release(request):
            self.events.append(Event(request.id, ready))

    def _release(self, request: Request) -> tuple[int, ...]:
        """Publish committed tokens that no stop string can claim any more; at an end, all
        others.
        """
        given = request.given
        stop = request.stop_text
        count = len(request.history) - given
        if stop is not None and (stop.is_complete or not request.is_finished):
            count = stop.publishable()
        ready = tuple(request.history[given + len(request.token_ids) : given + count])
        request.token_ids.extend(ready)
        return ready

    def _keep(self, request: Request) -> None:
        """Take a checkpoint of a request that ends, for its caller and for later prompts."""
        # A preview that refused the first token leaves no anchor to go on from.
        has_anchor = len(request.history) > len(request.prompt)
        if not has_anchor or not (request.keep or self.prefixes.capacity):
            return
        checkpoint = self.take(request)
        if request.keep:
            request.checkpoint = checkpoint
        if not checkpoint.is_multimodal:
            self.prefixes.store(checkpoint)

    def take(self, request: Request) -> Checkpoint:
        """A checkpoint of an admitted request between two rounds; its context catches up first."""
        if request.pending and self.rounds.catch_up is not None:
            self._catch_up(request, self.rounds.catch_up)
        return Checkpoint(
            coverage=self.coverage(),
            tokens=tuple(request.history[: request.frontier]),
            anchor=request.anchor,
            generated=request.generated,
            rope_delta=request.rope_delta,
            is_multimodal=request.is_multimodal,
            images=self.rounds.state.image(request.slot, request.pages, request.frontier),
        )

    def _catch_up(self, request: Request, executor: Executor) -> None:
        behind = range(request.context_frontier, request.context_frontier + self.rounds.columns)
        fields: dict[str, Any] = {
            "slots": [request.slot],
            "page_table": self._tables([request]),
            "context_positions": [[list(behind)]],
            "context_frontier": [request.context_frontier],
            "pending": [request.pending],
        }
        executor.inputs.fill(**{k: v for k, v in fields.items() if k in executor.inputs})
        executor.run()
        request.context_frontier = request.frontier

    def coverage(self) -> Coverage:
        """What checkpoints of this engine belong to."""
        if self._coverage is None:
            model = self.rounds.model
            self._coverage = coverage_of(model.pair, model.weights)
        return self._coverage

    def end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request and give back what it holds."""
        request.finish_reason = reason
        tokens = self._release(request)
        if request.is_admitted:
            self.slots.give(request.slot)
            for page in request.pages:
                self.pages.give(page)
            request.slot, request.pages = -1, []
        # An interrupted admission leaves a request with a slot in the queue, or in both places.
        for queue in (self.active, self.waiting):
            if request in queue:
                queue.remove(request)
        ended = self.statistics.ended
        ended[reason] = ended.get(reason, 0) + 1
        self.events.append(Event(request.id, tokens, reason))

    def _reserve(self, request: Request, positions: int) -> None:
        """Hold pages for positions [0, positions)."""
        while len(request.pages) * PAGE_SIZE < positions:
            request.pages.append(self.pages.take())

    def _tables(self, batch: Sequence[Request]) -> np.ndarray:
        """Page tables `[B, M]`, padded with -1."""
        entries = self.rounds.capacities.request_pages
        rows = [request.page_table(entries) for request in batch]
        return np.concatenate(rows).reshape(-1, entries)


def _non_finite(request: Request) -> Choice:
    message = (
        f"request {request.id}: a logit after position {request.frontier - 1} is not finite; "
        "no token was emitted"
    )
    return Choice(0, "error", NonFiniteLogitsError(message))


def _law_fields(batch: Sequence[Request]) -> dict[str, Any]:
    """Sampling values of each row, as a sampling executor's frame takes them."""
    params = [request.params for request in batch]
    return {
        "temperature": [p.temperature for p in params],
        "top_k": [p.top_k for p in params],
        "top_p": [p.top_p for p in params],
        "min_p": [p.min_p for p in params],
        "presence": [p.presence_penalty for p in params],
        "frequency": [p.frequency_penalty for p in params],
        "seed": [[_signed(p.seed & 0xFFFFFFFF), _signed(p.seed >> 32)] for p in params],
    }


def _signed(word: int) -> int:
    """A 32-bit word as the int32 of the same bits."""
    return word - 2**32 if word >= 2**31 else word
