"""engine: what users call. It checks, queues, streams and cancels; its scheduler runs the rounds.

Any thread may call an engine. Calls take turns, so that one at a time owns the executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from torch import Tensor

from dflash_graph import demo
from dflash_graph.contexts import Checkpoint
from dflash_graph.errors import ContextError, EngineClosedError, OptionError, RequestError
from dflash_graph.options import EngineOptions, SamplingParams, require_built
from dflash_graph.profile.build import started_profile
from dflash_graph.profile.document import Profile
from dflash_graph.profile.parts import Ceiling
from dflash_graph.rehearsal import Rehearsals
from dflash_graph.request import Event, Generation, Preview, Request
from dflash_graph.rounds import Model, Progress, Rounds, compile_rounds
from dflash_graph.scheduler import Scheduler
from dflash_graph.statistics import Statistics
from dflash_graph.stop_text import StopText
from dflash_graph.submission import (
    Media,
    Prompt,
    check_params,
    check_preview,
    checked_media,
    checked_prompt,
)
from dflash_graph.text import Tokenizer, load_tokenizer
from dflash_graph.turns import TurnLock


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
        self.scheduler = Scheduler(rounds, Rehearsals(rounds) if rounds.arena.is_cuda else None)
        self._next_id = 0
        self._closed = False
        self._is_working = False
        # Any thread may drive a step; one at a time owns the executors.
        self._lock = TurnLock()

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
        options = EngineOptions() if options is None else options
        if not isinstance(options, EngineOptions):
            raise OptionError(f"options: expected EngineOptions, got {options!r}")
        options = options.resolved()
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
            if not _checked_request(request).is_finished:
                self._require_own(request)
            if self._is_working or not (request.is_admitted and request.is_decoding):
                raise RequestError(
                    f"request {request.id}: expected one that is decoding, between two rounds; "
                    "step until it has its first token, or submit with keep=True"
                )
            with self._working():
                return self.scheduler.take(request)

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
            ContextError: the checkpoint belongs to another target, draft or dtype, or its parts do
                not belong together.
            RequestError: it leaves no room for a token, or the parameters cannot be served.
            EngineClosedError: the engine is closed.
        """
        if not isinstance(checkpoint, Checkpoint):
            raise ContextError(f"checkpoint: expected a Checkpoint, got {checkpoint!r}")
        vocab = self.rounds.model.pair.target.vocab
        with self._lock:
            checkpoint.require(self.scheduler.coverage(), vocab)
        self.rounds.state.require_image(checkpoint.images, checkpoint.frontier)
        params = SamplingParams() if params is None else params
        check_params(params, self.tokenizer, vocab)
        check_preview(preview)
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
            stop_text=self._stop_text(params, checkpoint.generated),
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
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts: expected a list of prompts, got {prompts!r}")
        prompts = list(prompts)
        if isinstance(params, SamplingParams) or not isinstance(params, Iterable):
            each = [params] * len(prompts)
        else:
            each = list(params)
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

    def stream(self, request: Request) -> Stream:
        """Events of a request as its tokens are committed, driving the engine while it waits.

        Closing the stream early, or dropping it, cancels the request. Several streams of one engine
        may run in turn; each sees every token of its request exactly once.
        """
        return Stream(self, _checked_request(request))

    def cancel(self, request: Request) -> None:
        """End a request; what it has published stays. A finished request stays as it is.

        While another thread runs a round, the request ends with that round or before the next one;
        so it does if a signal handler calls this inside a step. A preview may cancel its own
        request or another: the round then commits nothing of it.

        Raises:
            RequestError: the request belongs to another engine.
        """
        self.scheduler.leaving.append(_checked_request(request))
        with self._lock:
            if self._is_working and not self.scheduler.is_previewing:
                return  # executors run beneath this very call: `_working` ends the request
            if request in self.scheduler.leaving:
                self.scheduler.leaving.remove(request)
            if not request.is_finished:
                self._require_own(request)
                self.scheduler.end(request, "cancelled")

    def result(self, request: Request) -> Generation:
        """The result of a finished request; raises RequestError while it runs."""
        _checked_request(request)
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
    def statistics(self) -> Statistics:
        """Counts over every request of this engine."""
        return self.scheduler.statistics

    def profile(
        self, *, name: str | None = None, context: int = 0, ceiling: Ceiling | None = None
    ) -> Profile:
        """What this start-up built: nodes with their kernels, plans, memory, start-up, acceptance.

        Times of rounds are not in it: `dflash-graph profile build --measure` takes them.

        Args:
            name: of the pair, for people; by default the architectures.
            context: tokens before the block that costs are for.
            ceiling: what floors stand on.

        Raises:
            OptionError: the context is negative.
        """
        if context < 0:
            raise OptionError(f"context: expected at least 0 tokens, got {context}")
        with self._lock:
            pair = self.rounds.model.pair
            return started_profile(
                self.rounds,
                name=name or f"{pair.target.architecture} with {pair.draft_name}",
                context=context,
                ceiling=ceiling,
                statistics=self.statistics,
            )

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self.scheduler.waiting and not self.scheduler.active

    def close(self) -> None:
        """Cancel what runs and refuse further calls. Closing twice is fine."""
        with self._lock:
            for request in (*self.scheduler.active, *self.scheduler.waiting):
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
            What was published, and every end since the last step. What `generate` and streams
            published in steps of their own, they return.

        Raises:
            EngineClosedError: the engine is closed.
            RequestError: a preview called it, inside a round that is not committed yet.
        """
        with self._lock:
            self._require_open()
            if self._is_working:
                raise RequestError("step: expected a call between rounds, got one from within")
            with self._working():
                self.scheduler.advance()
            events, self.scheduler.events = self.scheduler.events, []
            return events

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Executors run: whoever is called meanwhile leaves requests as they are."""
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False
            self.scheduler.leave()

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
        params = SamplingParams() if params is None else params
        target = self.rounds.model.pair.target
        ids = checked_prompt(prompt, self.tokenizer, target.vocab, self._capacity)
        check_params(params, self.tokenizer, target.vocab)
        check_preview(preview)
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

    def _stop_text(self, params: SamplingParams, before: tuple[int, ...] = ()) -> StopText | None:
        if not params.stop or self.tokenizer is None:
            return None
        return StopText(self.tokenizer, params.stop, before)

    def _queue(self, requests: Sequence[Request]) -> None:
        """Number requests and let them wait: all, or none where the engine is closed."""
        with self._lock:
            self._require_open()
            for request in requests:
                request.id = self._next_id
                self._next_id += 1
                self.scheduler.waiting.append(request)

    def _require_own(self, request: Request) -> None:
        if not self.scheduler.owns(request):
            raise RequestError(f"request {request.id}: it belongs to another engine")

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("engine: it was closed; load another one")


class Stream(Iterator[Event]):
    """Events of one request, see `Engine.stream`.

    Args:
        engine: that it steps.
        request: of that engine.

    Example:
        >>> import dflash_graph as dg
        >>> options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=256)
        >>> with dg.Engine.demo(options) as engine:
        ...     with engine.stream(engine.submit("import os\\n")) as stream:
        ...         first = next(stream)
        >>> first.finish_reason, stream.request.finish_reason
        (None, 'cancelled')
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self._sent = 0
        self._is_open = True

    def __next__(self) -> Event:
        """The next tokens, as many as there are; the last event has the finish reason.

        Raises:
            StopIteration: after the last, or once it was closed.
            RequestError: the request belongs to another engine.
            EngineClosedError: the engine was closed and the request has ended.
        """
        while self._is_open:
            try:
                event = self._advance()
            except BaseException:
                self.close()
                raise
            if event is not None:
                self._is_open = event.finish_reason is None
                return event
        raise StopIteration

    def _advance(self) -> Event | None:
        """What there is to tell, after a step if there was nothing."""
        engine, request = self.engine, self.request
        with engine._lock:  # given back after each step, for others who wait
            if len(request.token_ids) == self._sent and not request.is_finished:
                engine._require_own(request)
                engine.step()
            tokens = tuple(request.token_ids[self._sent :])
            reason = request.finish_reason
        self._sent += len(tokens)
        return Event(request.id, tokens, reason) if tokens or reason is not None else None

    def close(self) -> None:
        """Cancel the request unless it has ended. Closing twice is fine."""
        self._is_open = False
        if self.engine.scheduler.owns(self.request):
            self.engine.cancel(self.request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()


def _checked_request(request: Request) -> Request:
    if not isinstance(request, Request):
        raise RequestError(f"request: expected what submit returned, got {request!r}")
    return request
