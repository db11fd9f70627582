"""engine: the host's state machine around compiled rounds.

One step admits waiting requests, prefills one chunk, and runs one round over every decoding
request, as an exact, compact batch. The order within a round is always preview, model commit,
accounting, publication: until the commit nothing of a request has changed, so a round that is
interrupted before it is as if it had not been.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from dflash_graph import demo
from dflash_graph.contexts import Checkpoint, Coverage, PrefixCache, coverage_of
from dflash_graph.errors import (
    DFlashGraphError,
    EngineClosedError,
    NonFiniteLogitsError,
    RequestError,
)
from dflash_graph.executors import Executor, RoundExecutor
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.options import EngineOptions, SamplingParams
from dflash_graph.request import Event, Generation, Preview, Request
from dflash_graph.rounds import Model, Progress, Rounds, compile_rounds
from dflash_graph.state import FreeList, table_row
from dflash_graph.statistics import FinishReason, RoundRecord, Statistics
from dflash_graph.stop_text import StopText
from dflash_graph.submission import (
    Media,
    Prompt,
    check_params,
    checked_media,
    checked_prompt,
    require_built,
)
from dflash_graph.text import Tokenizer, load_tokenizer


class _Choice(NamedTuple):
    """What a round may publish of a request: N, and why it ends there, if it does."""

    kept: int
    reason: FinishReason | None = None
    error: DFlashGraphError | None = None


class Engine:
    """Generates with a target, and a draft where there is one.

    Args:
        rounds: compiled executors.
        tokenizer: for text prompts and results, or None.

    Example:
        >>> import dflash_graph as dg
        >>> options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=256)
        >>> with dg.Engine.demo(options) as engine:
        ...     result = engine.generate(["import os\\n"], dg.SamplingParams(max_new_tokens=8))[0]
        >>> len(result.token_ids), result.finish_reason
        (8, 'length')
    """

    def __init__(self, rounds: Rounds, tokenizer: Tokenizer | None = None) -> None:
        self.rounds = rounds
        self.tokenizer = tokenizer
        self._capacity = rounds.capacities.context
        self._slots = FreeList("slot", rounds.capacities.slots)
        self._pages = FreeList("page", rounds.capacities.bindings()["pages"])
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._events: list[Event] = []
        self._next_id = 0
        self._prefixes = PrefixCache(rounds.options.prefix_cache_bytes)
        self._coverage: Coverage | None = None
        #: Counts over every request of this engine.
        self.statistics = Statistics()
        self._closed = False
        self._in_step = False
        # Any thread may drive a step; one at a time owns the executors.
        self._lock = threading.RLock()

    @classmethod
    def load(
        cls,
        target_dir: str | Path,
        draft_dir: str | Path | None = None,
        options: EngineOptions | None = None,
        *,
        progress: Progress | None = None,
    ) -> Self:
        """Load checkpoints and compile their rounds.

        Args:
            target_dir: Hugging Face directory of the target.
            draft_dir: of the draft, or None for plain decoding.
            options: startup choices; the defaults if None.
            progress: called as ``progress(stage, done, total)``.

        Raises:
            ConfigError: a config is missing or impossible.
            CheckpointError: a weight file or tensor is.
            OptionError: an option asks for what this release does not have, or contradicts the
                models.
            DeviceMemoryError: it does not fit.
        """
        options = (options or EngineOptions()).resolved()
        require_built(options)
        tokenizer = load_tokenizer(target_dir)
        vocab = tokenizer.vocab_size if tokenizer is not None else None
        model = Model.load(target_dir, draft_dir, options, tokenizer_vocab=vocab, progress=progress)
        return cls(compile_rounds(model, options, progress), tokenizer)

    @classmethod
    def demo(
        cls,
        options: EngineOptions | None = None,
        *,
        draft: Literal["dflash", "dflash2"] = "dflash2",
        progress: Progress | None = None,
    ) -> Self:
        """An engine over the small trained pair that ships with the package."""
        return cls.load(
            demo.target_directory(), demo.draft_directory(draft), options, progress=progress
        )

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        preview: Preview | None = None,
        embeddings: Mapping[int, Tensor] | None = None,
        positions: Tensor | Sequence[Sequence[int]] | None = None,
        keep: bool = False,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: token ids, or text where the engine has a tokenizer.
            params: sampling parameters.
            preview: called once a round with the licensed tokens, after stops and budget have cut
                them; returns how many to keep. Keeping fewer than all goes on from there, 0 ends
                the request.
            embeddings: by prompt position an embedding `[H]` that takes the place of the token's:
                a vision tower's output.
            positions: rotary positions `[3, T]` (temporal, height, width) of the prompt; text
                positions if None. Generated tokens go on from their maximum.
            keep: take a checkpoint when the request ends by "stop" or "length"; it is then
                `request.checkpoint`.

        Raises:
            RequestError: the prompt is empty, too long or holds ids outside the vocabulary, its
                embeddings or positions do not fit it, or the parameters ask for what the engine
                cannot do. Nothing is queued.
            EngineClosedError: the engine is closed.
        """
        request = self._checked(
            prompt, params, preview, embeddings=embeddings, positions=positions, keep=keep
        )
        self._queue([request])
        return request

    def checkpoint(self, request: Request) -> Checkpoint:
        """The whole state of a running request between two rounds; the request goes on.

        Raises:
            RequestError: the request is not decoding (waiting, in prefill, ended), or a preview
                called it.
            EngineClosedError: the engine is closed.
        """
        with self._lock:
            self._require_open()
            if not request.is_finished:
                self._require_own(request)
            if self._in_step or not (request.is_admitted and request.is_decoding):
                raise RequestError(
                    f"request {request.id}: expected one that is decoding, between two rounds; "
                    "step until it has its first token, or submit with keep=True"
                )
            return self._take(request)

    def fork(
        self,
        checkpoint: Checkpoint,
        params: SamplingParams | None = None,
        *,
        preview: Preview | None = None,
        keep: bool = False,
    ) -> Request:
        """Queue a request that continues from a checkpoint; its tokens are those after the anchor.

        Raises:
            ContextError: the checkpoint belongs to another target, draft or dtype.
            RequestError: it leaves no room for a token, or the parameters cannot be served.
            EngineClosedError: the engine is closed.
        """
        with self._lock:
            self._coverage_now().require(checkpoint.coverage, "checkpoint")
        params = params or SamplingParams()
        vocab = self.rounds.model.pair.target.vocab
        check_params(params, self.tokenizer, vocab)
        room = self._capacity - checkpoint.frontier - 1
        if room < 1:
            raise RequestError(
                f"checkpoint: expected fewer than {self._capacity - 1} processed tokens "
                f"(max_context {self._capacity}), got {checkpoint.frontier}"
            )
        request = Request(
            -1,
            checkpoint.tokens,
            params,
            self._stops(params),
            min(params.max_new_tokens, room),
            preview,
            source=checkpoint,
            stop_text=self._stop_text(params),
            keep=keep,
        )
        self._queue([request])
        return request

    def restore(
        self,
        replica: Checkpoint | str | Path,
        params: SamplingParams | None = None,
        *,
        preview: Preview | None = None,
        keep: bool = False,
    ) -> Request:
        """Queue a request that continues from a replica in host memory, or a saved one.

        Raises:
            ContextError: the files are damaged, or as `fork`.
        """
        if not isinstance(replica, Checkpoint):
            replica = Checkpoint.load(replica)
        return self.fork(replica, params, preview=preview, keep=keep)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Generate for every prompt; results stand in the order of the prompts.

        Args:
            prompts: token ids or texts, any number of them.
            params: for all, or one per prompt.

        Raises:
            RequestError: as `submit`; then nothing was queued.
        """
        each = (
            [params] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(prompts):
            raise RequestError(f"params: expected one for all or {len(prompts)}, got {len(each)}")
        requests = [self._checked(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        self._queue(requests)
        try:
            while not all(request.is_finished for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return [self.result(request) for request in requests]

    def stream(self, request: Request) -> Iterator[Event]:
        """Events of a request as its tokens are committed, driving the engine while it waits.

        Closing the generator early cancels the request. Several streams of one engine may run in
        turn; each sees every token of its request exactly once.
        """
        sent = 0
        try:
            while True:
                with self._lock:
                    while len(request.token_ids) == sent and not request.is_finished:
                        self._require_own(request)
                        self.step()
                    tokens = tuple(request.token_ids[sent:])
                    reason = request.finish_reason
                sent += len(tokens)
                yield Event(request.id, tokens, reason)
                if reason is not None:
                    return
        finally:
            if self._owns(request):
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """End a request; what it has published stays. A finished request stays as it is.

        A preview may cancel its own request or another: the round then commits nothing of it.

        Raises:
            RequestError: the request belongs to another engine.
        """
        with self._lock:
            if not request.is_finished:
                self._require_own(request)
                self._end(request, "cancelled")

    def result(self, request: Request) -> Generation:
        """The result of a finished request; raises RequestError while it runs."""
        if request.finish_reason is None:
            raise RequestError(f"request {request.id}: not finished; step the engine or cancel it")
        text = self.tokenizer.decode(request.token_ids) if self.tokenizer is not None else None
        if request.stop_text is not None:
            text = request.stop_text.final_text()
        return Generation(
            tuple(request.token_ids),
            request.finish_reason,
            tuple(request.rounds),
            text,
            request.error,
        )

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._waiting and not self._active

    def close(self) -> None:
        """Cancel what runs and refuse further calls. Closing twice is fine."""
        with self._lock:
            for request in (*self._active, *self._waiting):
                self.cancel(request)
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def step(self) -> list[Event]:
        """Admit, prefill one chunk, run one round.

        Returns:
            What was published, and every end since the last step.

        Raises:
            EngineClosedError: the engine is closed.
            RequestError: a preview called it, inside a round that is not committed yet.
        """
        with self._lock:
            self._require_open()
            if self._in_step:
                raise RequestError("step: expected a call between rounds, got one from a preview")
            self._in_step = True
            try:
                self._advance()
            finally:
                self._in_step = False
            events, self._events = self._events, []
            return events

    def _advance(self) -> None:
        self._admit()
        prefilling = next((r for r in self._active if r.is_prefilling), None)
        if prefilling is not None:
            self._prefill(prefilling)
        decoding = [r for r in self._active if r.is_decoding]
        if decoding:
            self._round(decoding)

    def _admit(self) -> None:
        """Give waiting requests slots; one whose admission was interrupted has its slot already."""
        while self._waiting and (self._waiting[0].is_admitted or self._slots.free):
            request = self._waiting[0]
            if not request.is_admitted:
                request.slot = self._slots.take()
            self._install(request)
            if request not in self._active:
                self._active.append(request)
            self._waiting.popleft()

    def _install(self, request: Request) -> None:
        """Put a request's starting state into its slot: a context's, a stored prefix's, or none."""
        state = self.rounds.state
        state.reset_slot(request.slot)
        request.frontier = request.context_frontier = 0
        base = request.source
        if base is None and request.media is None:
            base = self._prefixes.longest(request.prompt)
        if base is not None:
            self._reserve(request, base.frontier)
            state.load_image(base.images, request.slot, request.pages)
            request.frontier = request.context_frontier = base.frontier
            if request.source is None:
                self.statistics.prefix_tokens += base.frontier
        if not request.is_plain_greedy:
            state.count(request.slot, request.generated)

    def _prefill(self, request: Request) -> None:
        """Process the next chunk of a prompt; after the last one, choose the first token."""
        # The whole prompt is processed already if choosing the first token was interrupted.
        if request.frontier < len(request.prompt):
            try:
                self._prefill_chunk(request)
            except BaseException:
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
            "page_table": [self._table(request)],
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
        self._publish(request, [token], choice)
        if self._prefixes.capacity and request.is_decoding and request.media is None:
            self._prefixes.store(self._take(request))

    def _round(self, batch: list[Request]) -> None:
        """One round over `batch`: forward, preview, commit, accounting, publication."""
        is_greedy = all(request.is_plain_greedy for request in batch)
        executor = self.rounds[len(batch)] if is_greedy else self.rounds.sampling[len(batch)]
        live_drafts = [self._live_drafts(request) for request in batch]
        outputs = executor.forward(self._round_fields(executor, batch, live_drafts))
        for request in batch:
            request.context_frontier = request.frontier  # materialize has caught up
        accepted = outputs[f"{executor.law}.accepted"].tolist()
        finite = outputs[f"{executor.law}.finite"].tolist()
        rows = outputs[f"{executor.law}.outputs"].tolist()

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
        try:
            executor.finish(committed)
        except BaseException as error:
            # A commit that stopped half-way leaves state that no frontier describes.
            for request in batch:
                if not request.is_finished:
                    request.error = RequestError(
                        f"request {request.id}: its commit was interrupted ({error!r})"
                    )
                    self._end(request, "error")
            raise
        for index, request in enumerate(batch):
            if request.is_finished:
                continue
            request.frontier += committed[index]
            licensed = accepted[index] + 1
            record = RoundRecord(live_drafts[index], accepted[index], licensed, committed[index])
            request.rounds.append(record)
            self.statistics.add(record)
            self._publish(request, rows[index], choices[index])

    def _round_fields(
        self, executor: RoundExecutor, batch: list[Request], live_drafts: list[int]
    ) -> dict[str, Any]:
        """Input frame of a round, and the pages its columns may be written to."""
        columns = self.rounds.columns
        for request, live in zip(batch, live_drafts, strict=True):
            self._reserve(request, request.frontier + live + 1)
        ahead = [[r.frontier + i for i in range(columns)] for r in batch]
        rotary = [[r.frontier + r.rope_delta + i for i in range(columns)] for r in batch]
        fields: dict[str, Any] = {
            "slots": [r.slot for r in batch],
            "page_table": [self._table(r) for r in batch],
            "anchor": [r.anchor for r in batch],
            "frontier": [r.frontier for r in batch],
            "live_drafts": live_drafts,
            "live_columns": [live + 1 for live in live_drafts],
            "positions": [rotary] * 3,
            **_law_fields(batch),
        }
        draft = self.rounds.model.pair.draft
        if draft is not None:
            # DFlash attends over its live columns, DFlash2 over all W (spec section 1).
            whole = draft.kind == "dflash2"
            fields |= {
                "context_frontier": [r.context_frontier for r in batch],
                "pending": [r.pending for r in batch],
                "context_positions": [
                    [[r.context_frontier + i for i in range(columns)] for r in batch]
                ],
                "draft_positions": [ahead],
                "draft_columns": [columns if whole else live + 1 for live in live_drafts],
            }
        return {name: value for name, value in fields.items() if name in executor.inputs}

    def _live_drafts(self, request: Request) -> int:
        """P: no more drafts than the budget can use; the budget never exceeds the capacity."""
        return min(self.rounds.draft_tokens, request.remaining)

    def _preview(self, request: Request, licensed: list[int]) -> _Choice:
        """N of a row and why it ends: stop tokens, the budget, then the frontend's own choice."""
        if request.is_finished:
            return _Choice(0)
        kept = len(licensed)
        reason: FinishReason | None = None
        for index, token in enumerate(licensed):
            if token in request.stops:
                kept, reason = index + 1, "stop"
                break
        if kept > request.remaining or (kept == request.remaining and reason is None):
            kept, reason = request.remaining, "length"
        if request.stop_text is not None:
            complete = request.stop_text.scan(licensed[:kept])
            if complete is not None:
                kept, reason = complete, "stop"
        if request.preview is None:
            return _Choice(kept, reason)
        try:
            chosen = request.preview(tuple(licensed[:kept]))
        except Exception as error:
            message = f"request {request.id}: its preview raised {error!r}"
            return _Choice(0, "error", RequestError(message))
        if type(chosen) is not int or not 0 <= chosen <= kept:
            message = (
                f"request {request.id}: preview must return an integer 0..{kept}, got {chosen!r}"
            )
            return _Choice(0, "error", RequestError(message))
        if chosen == kept:
            return _Choice(kept, reason)
        return _Choice(chosen, None if chosen else "stop")

    def _publish(self, request: Request, outputs: list[int], choice: _Choice) -> None:
        """Account for the first N outputs and publish what may be; a choice with a reason ends."""
        tokens = outputs[: choice.kept]
        request.history.extend(tokens)
        if request.stop_text is not None:
            request.stop_text.commit(tokens)
        request.error = choice.error
        if choice.reason is not None:
            if choice.reason in ("stop", "length") and (request.keep or self._prefixes.capacity):
                self._keep(request)
            self._end(request, choice.reason)
        elif ready := self._release(request):
            self._events.append(Event(request.id, ready))

    def _release(self, request: Request) -> tuple[int, ...]:
        """Publish committed tokens that no stop string can claim any more; at an end, all
        others.
        """
        mine = request.history[request.given :]
        stop = request.stop_text
        count = len(mine)
        if stop is not None and (stop.is_complete or not request.is_finished):
            count = stop.publishable()
        ready = tuple(mine[len(request.token_ids) : count])
        request.token_ids.extend(ready)
        return ready

    def _keep(self, request: Request) -> None:
        """Take a checkpoint of a request that ends, for its caller and for later prompts."""
        checkpoint = self._take(request)
        if request.keep:
            request.checkpoint = checkpoint
        if request.media is None and (request.source is None or not request.source.rope_delta):
            self._prefixes.store(checkpoint)

    def _take(self, request: Request) -> Checkpoint:
        """A checkpoint of an admitted request between two rounds; its context catches up first."""
        if request.pending and self.rounds.catch_up is not None:
            self._catch_up(request, self.rounds.catch_up)
        return Checkpoint(
            coverage=self._coverage_now(),
            tokens=tuple(request.history[: request.frontier]),
            anchor=request.anchor,
            generated=request.generated,
            rope_delta=request.rope_delta,
            images=self.rounds.state.image(request.slot, request.pages, request.frontier),
        )

    def _catch_up(self, request: Request, executor: Executor) -> None:
        behind = range(request.context_frontier, request.context_frontier + self.rounds.columns)
        fields: dict[str, Any] = {
            "slots": [request.slot],
            "page_table": [self._table(request)],
            "context_positions": [[list(behind)]],
            "context_frontier": [request.context_frontier],
            "pending": [request.pending],
        }
        executor.inputs.fill(**{k: v for k, v in fields.items() if k in executor.inputs})
        executor.run()
        request.context_frontier = request.frontier

    def _coverage_now(self) -> Coverage:
        if self._coverage is None:
            model = self.rounds.model
            self._coverage = coverage_of(model.pair, model.weights)
        return self._coverage

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a request and give back what it holds."""
        request.finish_reason = reason
        tokens = self._release(request)
        if request.is_admitted:
            self._slots.give(request.slot)
            for page in request.pages:
                self._pages.give(page)
            request.slot, request.pages = -1, []
        # An interrupted admission leaves a request with a slot in the queue, or in both places.
        for queue in (self._active, self._waiting):
            if request in queue:
                queue.remove(request)
        ended = self.statistics.ended
        ended[reason] = ended.get(reason, 0) + 1
        self._events.append(Event(request.id, tokens, reason))

    def _reserve(self, request: Request, positions: int) -> None:
        """Hold pages for positions [0, positions)."""
        while len(request.pages) * PAGE_SIZE < positions:
            request.pages.append(self._pages.take())

    def _table(self, request: Request) -> list[int]:
        return table_row(request.pages, self.rounds.capacities)

    def _checked(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        preview: Preview | None = None,
        *,
        embeddings: Mapping[int, Tensor] | None = None,
        positions: Tensor | Sequence[Sequence[int]] | None = None,
        keep: bool = False,
    ) -> Request:
        """A request that can be served, not queued yet."""
        params = params or SamplingParams()
        target = self.rounds.model.pair.target
        ids = checked_prompt(prompt, self.tokenizer, target.vocab, self._capacity)
        check_params(params, self.tokenizer, target.vocab)
        media: Media | None = checked_media(embeddings, positions, len(ids), target.hidden)
        return Request(
            -1,
            ids,
            params,
            self._stops(params),
            min(params.max_new_tokens, self._capacity - len(ids)),
            preview,
            media=media,
            stop_text=self._stop_text(params),
            keep=keep,
        )

    def _stops(self, params: SamplingParams) -> frozenset[int]:
        ends = () if params.ignore_eos else self.rounds.model.eos_token_ids
        return frozenset((*params.stop_token_ids, *ends))

    def _stop_text(self, params: SamplingParams) -> StopText | None:
        if not params.stop or self.tokenizer is None:
            return None
        return StopText(self.tokenizer, params.stop)

    def _queue(self, requests: Sequence[Request]) -> None:
        """Number requests and let them wait: all, or none where the engine is closed."""
        with self._lock:
            self._require_open()
            for request in requests:
                request.id = self._next_id
                self._next_id += 1
                self._waiting.append(request)

    def _owns(self, request: Request) -> bool:
        return request in self._active or request in self._waiting

    def _require_own(self, request: Request) -> None:
        if not self._owns(request):
            raise RequestError(f"request {request.id}: it belongs to another engine")

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("engine: it was closed; load another one")


def _non_finite(request: Request) -> _Choice:
    message = (
        f"request {request.id}: a logit after position {request.frontier - 1} is not finite; "
        "no token was emitted"
    )
    return _Choice(0, "error", NonFiniteLogitsError(message))


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
