"""rounds: from two checkpoints and a handful of options to the compiled executors an engine runs.

`Model` is what is loaded (geometry, weights, vocabulary); `compile_rounds` turns it into `Rounds`:
one executor per exact batch size, prefill chunks, one arena and the state pools. Other engines can
stop here and drive the executors.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

import torch
from torch import Tensor

from dflash_graph.ahead_of_time import precompile
from dflash_graph.checkpoint import Checkpoint, draft_layout, target_layout
from dflash_graph.choices import Choices
from dflash_graph.errors import DeviceMemoryError, OptionError
from dflash_graph.executors import (
    Compiled,
    Executor,
    Lowering,
    RoundExecutor,
    StillExecutor,
    compile_segments,
    new_arena,
)
from dflash_graph.geometry import (
    TargetGeometry,
    read_draft_geometry,
    read_generation_config,
    read_target_geometry,
)
from dflash_graph.graph import Backend, Graph
from dflash_graph.kernels import cases_of
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import (
    declare_first_token,
    declare_prefill,
    declare_round,
    declare_startup,
    declare_state,
)
from dflash_graph.options import EngineOptions, require_built
from dflash_graph.passes.combine import combine
from dflash_graph.profile_store import device_identity, lookup
from dflash_graph.state import Capacities, StatePools, plan_state
from dflash_graph.tensor import WeightUse
from dflash_graph.weights import WeightStore, random_weights

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Called with what is being done, steps done and steps in all.
Progress = Callable[[str, int, int], None]

#: Physical tokens of the smallest prefill chunk; a chunk takes the smallest power of two that holds
#: it.
SMALLEST_CHUNK = 16


@dataclass(frozen=True)
class CaptureCost:
    """What the capture of one executor took: seconds, and bytes of device memory."""

    seconds: float
    nbytes: int


@dataclass(frozen=True)
class Model:
    """A loaded pair.

    Args:
        pair: geometry and the choices that shape graphs.
        weights: tensor of every weight use of the pair's graphs.
        eos_token_ids: ids at which a request stops unless it asks not to.
        load_seconds: what reading the weights took, None where none were read.
    """

    pair: ModelPair
    weights: Mapping[WeightUse, Tensor]
    eos_token_ids: tuple[int, ...] = ()
    load_seconds: float | None = None

    @classmethod
    def load(
        cls,
        target_dir: str | Path,
        draft_dir: str | Path | None,
        options: EngineOptions,
        *,
        tokenizer_vocab: int | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Read geometry and weights of a target and, for speculation, a draft.

        Args:
            target_dir: Hugging Face directory of the target.
            draft_dir: of the draft; None decodes plainly. Not read with
                `options.speculative=False`.
            options: startup choices.
            tokenizer_vocab: ids a tokenizer knows; the public vocabulary where the options set
                none.
            progress: called while weights are read, in bytes.

        Raises:
            ConfigError: a config is missing or impossible (see its subclasses for pairs and
                architectures).
            CheckpointError: a weight file or tensor is missing, extra, misshapen, ill-typed or
                corrupt.
            OptionError: an option contradicts the models, or this release does not have it.
            DeviceMemoryError: the weights do not fit the device.
        """
        options = options.resolved()
        require_built(options)
        assert options.device is not None and options.dtype is not None
        if not options.speculative:
            draft_dir = None
        target = read_target_geometry(target_dir)
        pair = ModelPair(
            target,
            read_draft_geometry(draft_dir) if draft_dir is not None else None,
            dtype=options.dtype,
            public_vocab=_public_vocab(options, tokenizer_vocab, target),
            draft_causality=options.draft_causality,
        )
        _log_causality(pair)
        assert options.lowering is not None
        uses = weight_uses(pair, options.lowering)
        start = time.perf_counter()
        checkpoints = {"target": Checkpoint.open(target_dir, target_layout(target))}
        if draft_dir is not None and pair.draft is not None:
            checkpoints["draft"] = Checkpoint.open(draft_dir, draft_layout(pair.draft))
        read = None if progress is None else _named(progress, "weights")
        try:
            weights = WeightStore.load(checkpoints, uses, options.device, read)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{options.device}: expected room for the weights of {pair.target.architecture} "
                f"with {pair.draft_name}, got {_available_bytes(options.device)} bytes free "
                f"before the allocation that failed: {error}"
            ) from error
        store = {use: weights[use] for use in weights}
        _settle(options.device)
        seconds = time.perf_counter() - start
        return cls(pair, store, read_generation_config(target_dir), seconds)

    @classmethod
    def random(cls, pair: ModelPair, options: EngineOptions, *, seed: int = 0) -> Model:
        """A pair with random weights of sensible scale, for benchmarks of any geometry.

        Args:
            pair: geometry; its dtype is the options'.
            options: startup choices.
            seed: of the weights.
        """
        options = options.resolved()
        assert options.device is not None and options.lowering is not None
        store = random_weights(weight_uses(pair, options.lowering), seed, options.device)
        return cls(pair, {use: store[use] for use in store})


def weight_uses(pair: ModelPair, backend: Backend = "eager") -> tuple[WeightUse, ...]:
    """Every weight use of a pair's graphs; they do not depend on batch or chunk.

    Kernels may read weights stacked that references read one by one: both are then uses.
    """
    tokens = 1 if pair.draft else 0
    graphs: list[Graph] = [
        *declare_round(pair, backend, draft_tokens=tokens, batch=1, sampling=True).segments,
        declare_prefill(pair, "eager", tokens=1),
        declare_first_token(pair, "eager"),
    ]
    graphs = [combine(graph) for graph in graphs]
    uses = {value.weight: None for graph in graphs for value in graph.by_role("weight")}
    return tuple(use for use in uses if use is not None)


class Rounds(Mapping[int, RoundExecutor]):
    """Compiled executors by exact batch size, and what they share.

    `rounds[B]` serves batches whose rows are all greedy without penalties, `rounds.sampling[B]`
    any. A row has the same bits in both.

    Args:
        model: the loaded pair.
        options: startup choices.
        progress: called for each stage.

    Raises:
        DeviceMemoryError: state, arena and weights do not fit the device; the message holds the
            plan.
    """

    def __init__(
        self, model: Model, options: EngineOptions, progress: Progress | None = None
    ) -> None:
        options = options.resolved()
        assert options.device is not None and options.lowering is not None
        self.model = model
        self.options = options
        self.backend: Backend = options.lowering
        self.draft_tokens = options.draft_tokens if model.pair.draft is not None else 0
        self.columns = self.draft_tokens + 1
        self.capacities = Capacities(options.max_batch, options.max_context)
        #: What kernels are chosen by; None where templates' defaults stand.
        self.choices = _device_choices(options.profile) if options.device == "cuda" else None
        pair = model.pair
        segments = declare_startup(
            pair,
            self.backend,
            draft_tokens=self.draft_tokens,
            max_batch=options.max_batch,
            prefill_chunk=self.chunk_tokens(options.prefill_chunk),
        )
        #: Seconds of each stage of this start-up.
        self.startup: dict[str, float] = {}
        compiled: dict[str, Compiled] = {}
        with self._timed("graphs"):
            for done, (name, graphs) in enumerate(segments.items()):
                _report(progress, "graphs", done, len(segments))
                compiled[name] = compile_segments(graphs, self.capacities, self.choices)
        _report(progress, "graphs", len(segments), len(segments))
        #: What was planned, by name; executors of prefill are bound when they are needed.
        self.compiled: Mapping[str, Compiled] = compiled
        self.plans = tuple(c.plan for c in compiled.values())
        self.state_plan = plan_state(declare_state(pair, self.columns), self.capacities)
        self._check_memory(options.device)
        #: Device memory that captured graphs take.
        self.graph_bytes = 0
        #: What each captured executor took of it, and how long, by name.
        self.captures: dict[str, CaptureCost] = {}
        if self.backend == "triton":
            with self._timed("compile"):
                self._compile_kernels(compiled.values(), progress)
        with self._timed("pools"):
            self.arena = new_arena(self.plans, options.device)
            self.state = StatePools(self.state_plan, options.device)
        batches = range(1, options.max_batch + 1)
        with self._timed("bind"):
            self._greedy = {batch: self._round(compiled[f"round B={batch}"]) for batch in batches}
            self.sampling: Mapping[int, RoundExecutor] = {
                batch: self._round(compiled[f"sampling B={batch}"]) for batch in batches
            }
            self._chunks: dict[tuple[int, bool], Executor] = {}
            #: Choose a request's first token: greedily, and from any law.
            self.first_token = self._small(compiled["first token"])
            self.first_sampled = self._small(compiled["sampled first token"])
            #: Materializes one request's pending features; None without a draft.
            self.catch_up = self._small(compiled["catch-up"]) if self.draft_tokens else None
        if self.backend != "eager":
            with self._timed("warm-up"):
                self._warm_up(progress)
        if self.backend == "triton" and options.device == "cuda" and options.cuda_graphs:
            with self._timed("capture"):
                self._capture(progress)
        for executor in self.executors().values():
            executor.runs = 0

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.startup[stage] = time.perf_counter() - start

    def __getitem__(self, batch: int) -> RoundExecutor:
        if batch not in self._greedy:
            raise OptionError(f"rounds: there are executors for B in {list(self)}, got {batch}")
        return self._greedy[batch]

    def __contains__(self, batch: object) -> bool:
        return batch in self._greedy

    @overload
    def get(self, batch: int, default: None = None) -> RoundExecutor | None: ...
    @overload
    def get(self, batch: int, default: T) -> RoundExecutor | T: ...
    def get(self, batch: int, default: object = None) -> object:
        """The executor of a batch size, or a default where there is none."""
        return self._greedy.get(batch, default)

    def __iter__(self) -> Iterator[int]:
        return iter(self._greedy)

    def __len__(self) -> int:
        return len(self._greedy)

    def still(self, batch: int) -> Rounds:
        """These rounds of one batch size, with executors that run nothing and have frames of their
        own on the host.
        """
        found = copy(self)
        found._greedy = {batch: StillExecutor(self[batch])}
        found.sampling = {batch: StillExecutor(self.sampling[batch])}
        return found

    def executors(self) -> dict[str, Executor]:
        """Every executor that is bound by now, by the name it is declared under."""
        found: dict[str, Executor] = {}
        for batch in self:
            found[f"round B={batch}"] = self._greedy[batch]
            found[f"sampling B={batch}"] = self.sampling[batch]
        for (tokens, embeddings), chunk in sorted(self._chunks.items()):
            found[_prefill_name(tokens, embeddings)] = chunk
        found["first token"] = self.first_token
        found["sampled first token"] = self.first_sampled
        if self.catch_up is not None:
            found["catch-up"] = self.catch_up
        return found

    def chunk_tokens(self, live: int) -> int:
        """Physical tokens of the prefill chunk that holds `live` ones."""
        physical = SMALLEST_CHUNK
        while physical < live:
            physical *= 2
        return min(physical, self.options.prefill_chunk)

    def prefill(self, live: int, *, embeddings: bool = False) -> Executor:
        """The executor of the chunk for `live` tokens, 1..prefill_chunk; with `embeddings` the one
        whose frame can replace token embeddings. Prefill runs the references, on a device library
        calls in their place.
        """
        key = (self.chunk_tokens(live), embeddings)
        if key not in self._chunks:
            # The largest chunk was compiled for its plan.
            compiled = self.compiled.get(_prefill_name(*key))
            if compiled is None:
                pair, tokens = self.model.pair, key[0]
                graph = declare_prefill(pair, "eager", tokens=tokens, embeddings=embeddings)
                compiled = compile_segments([graph], self.capacities)
            lowering: Lowering = "eager"
            if self.options.device == "cuda" and self.backend != "eager":
                lowering = "library"
            self._chunks[key] = self._bind(compiled, lowering)
        return self._chunks[key]

    def _round(self, compiled: Compiled) -> RoundExecutor:
        return RoundExecutor(
            compiled, self.arena, self.model.weights, self.state.tensors, self.backend
        )

    def _small(self, compiled: Compiled) -> Executor:
        """An executor of what is no round but as small; only kernels pay for it."""
        return self._bind(compiled, "triton" if self.backend == "triton" else "eager")

    def _bind(self, compiled: Compiled, lowering: Lowering) -> Executor:
        return Executor(compiled, self.arena, self.model.weights, self.state.tensors, lowering)

    def _compile_kernels(self, compiled: Iterable[Compiled], progress: Progress | None) -> None:
        """Compile what is not cached yet, several kernels at a time."""
        graphs = (graph for entry in compiled for graph in entry.graphs)
        cases = cases_of((g for g in graphs if g.key.backend == "triton"), self.choices)
        if self.options.device == "cuda":
            major, minor = torch.cuda.get_device_capability()
            precompile(cases, 10 * major + minor, progress and _named(progress, "compile"))

    def _warm_up(self, progress: Progress | None) -> None:
        """Run every executor once, so that nothing is compiled or loaded inside a request; state
        is cleared after.
        """
        executors = (*self._greedy.values(), *self.sampling.values())
        for done, executor in enumerate(executors):
            _report(progress, "warm up", done, len(executors))
            batch = executor.batch
            executor.inputs.fill(slots=list(range(batch)), live_columns=1)
            executor.inputs["page_table"][:, 0] = torch.arange(batch, dtype=torch.int32)
            executor.forward({})
            executor.finish([1] * batch)
            _settle(self.options.device)
            executor.inputs.clear()
        if self.backend == "triton":
            for small in (self.first_token, self.first_sampled, self.catch_up):
                if small is not None:
                    small.run()
                    _settle(self.options.device)
        if self.options.device == "cuda":
            # Libraries tune their kernels at the first chunk, whatever its length.
            chunk = self.prefill(SMALLEST_CHUNK)
            pages = [list(range(self.capacities.request_pages))]
            chunk.inputs.fill(live_columns=[1], page_table=pages)
            chunk.run()
            _settle(self.options.device)
        self.state.storage.zero_()
        _report(progress, "warm up", len(executors), len(executors))

    def _capture(self, progress: Progress | None) -> None:
        """One pair of CUDA Graphs for each exact batch."""
        found = self.executors()
        executors = {name: found[name] for name in found if not name.startswith("prefill")}
        stream = torch.cuda.Stream()
        _settle(self.options.device)
        first = before = torch.cuda.mem_get_info()[0]
        for done, (name, executor) in enumerate(executors.items()):
            _report(progress, "capture", done, len(executors))
            start = time.perf_counter()
            executor.capture(stream)
            _settle(self.options.device)
            free = torch.cuda.mem_get_info()[0]
            self.captures[name] = CaptureCost(time.perf_counter() - start, max(0, before - free))
            before = free
        self.graph_bytes = max(0, first - before)
        _report(progress, "capture", len(executors), len(executors))

    def _check_memory(self, device: str) -> None:
        arena = max(plan.arena_bytes for plan in self.plans)
        needed = arena + self.state_plan.nbytes
        available = _available_bytes(device)
        if needed > available:
            raise DeviceMemoryError(
                f"{device}: expected at least {needed} bytes for state ({self.state_plan.nbytes}: "
                f"{self.capacities.slots} requests of {self.capacities.context} tokens) and arena "
                f"({arena}), got {available} free; lower max_batch, max_context or prefill_chunk"
            )


def compile_rounds(
    model: Model, options: EngineOptions, progress: Progress | None = None
) -> Rounds:
    """Compile the executors of every batch size up to `options.max_batch`.

    Args:
        model: a loaded pair.
        options: the options it was loaded with.
        progress: called as ``progress(stage, done, total)``.

    Raises:
        OptionError: an option contradicts the model, or this release does not have it.
        DeviceMemoryError: state, arena and weights do not fit the device.

    Example:
        >>> import dflash_graph as dg
        >>> options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=2, max_context=64)
        >>> target, draft = dg.demo.target_directory(), dg.demo.draft_directory("dflash2")
        >>> model = dg.Model.load(target, draft, options)
        >>> rounds = dg.compile_rounds(model, options)
        >>> list(rounds), rounds[2].batch
        ([1, 2], 2)
    """
    options = options.resolved()
    require_built(options)
    _require_of(options, model.pair)
    return Rounds(model, options, progress)


def _require_of(options: EngineOptions, pair: ModelPair) -> None:
    """Raise OptionError for an option that says otherwise than the loaded pair."""
    stated: dict[str, tuple[object, object]] = {
        "dtype": (options.dtype, pair.dtype),
        "draft_causality": (options.draft_causality, pair.draft_causality),
    }
    if options.public_vocab is not None:
        stated["public_vocab"] = (options.public_vocab, pair.public_vocab)
    if not options.speculative:
        stated["speculative"] = (False, pair.draft is not None)
    for name, (given, loaded) in stated.items():
        if given != loaded:
            raise OptionError(
                f"EngineOptions.{name}: expected {loaded!r}, as the model was loaded, got {given!r}"
            )


def _public_vocab(
    options: EngineOptions, tokenizer_vocab: int | None, target: TargetGeometry
) -> int | None:
    if options.public_vocab is not None:
        return options.public_vocab
    if tokenizer_vocab is None:
        return None
    return min(tokenizer_vocab, target.vocab)


def _log_causality(pair: ModelPair) -> None:
    draft = pair.draft
    if draft is not None and draft.is_causal is None and "sliding_attention" in draft.layer_types:
        rule = "causal" if pair.draft_causality == "sliding" else "non-causal"
        logger.warning(
            "the draft's config does not state is_causal; its local layers are taken as %s "
            "(EngineOptions.draft_causality=%r)",
            rule,
            pair.draft_causality,
        )


def _available_bytes(device: str) -> int:
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_choices(profile: Path | None) -> Choices:
    """What is measured for this device; looked up, never measured here."""
    return lookup(device_identity(), profile)


def _prefill_name(tokens: int, embeddings: bool) -> str:
    """The name of a prefill chunk among what a start-up declares."""
    return f"prefill {'with embeddings ' if embeddings else ''}{tokens}"


def _settle(device: str | None) -> None:
    """Wait for what was queued."""
    if device == "cuda":
        torch.cuda.synchronize()


def _named(progress: Progress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(stage, done, total)


def _report(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)
