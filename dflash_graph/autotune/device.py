"""The measurer of a CUDA device.

Each candidate runs in a captured graph whose launches take turns over copies of their arguments
that are together larger than the L2 cache; graphs of all candidates and calls take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from dflash_graph.ahead_of_time import SHARED_LIMIT, precompile, processors
from dflash_graph.autotune.cards import Card, card_uuid
from dflash_graph.autotune.inputs import Arguments, Inputs, each, mapped
from dflash_graph.autotune.journal import Outcome, first_line
from dflash_graph.autotune.launching import Bound, Results, check, oracle
from dflash_graph.autotune.spaces import Candidate, Limits
from dflash_graph.autotune.tasks import Call, Task
from dflash_graph.autotune.tuner import DeviceLost
from dflash_graph.bench.timing import captured, interleaved
from dflash_graph.errors import DeviceMemoryError, OptionError
from dflash_graph.ops import get_op
from dflash_graph.profile_store import Identity, device_identity

#: Launches of a graph: enough that its own start does not count.
_LAUNCHES: Final = 8
_MOST_COPIES: Final = 64
#: Share of free memory that copies may take.
_SHARE: Final = 0.4


class CudaMeasurer:
    """Measures on the current CUDA device.

    Args:
        context: tokens before the block of every request.
        workers: processes of this machine that measure at a time; each compiles with its share of
            the processors.

    Raises:
        OptionError: torch sees no CUDA device.
    """

    def __init__(self, context: int = 2048, workers: int = 1) -> None:
        identity = device_identity()
        properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.capability = identity.capability
        usual = SHARED_LIMIT.get(self.capability, 99 * 1024)
        self._limits = Limits(
            shared=int(getattr(properties, "shared_memory_per_block_optin", usual)),
            processors=int(properties.multi_processor_count),
            has_pdl=self.capability >= 90,
        )
        self._cache_bytes = int(properties.L2_cache_size)
        self._context = context
        self._workers = workers
        self._bench: _Bench | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    def compile(self, task: Task, candidates: Sequence[Candidate]) -> None:
        cases = [call.case(c) for call in task.calls for c in candidates]
        jobs = max(1, processors() // self._workers)
        precompile(list(dict.fromkeys(cases)), self.capability, jobs=jobs)

    def measure(self, task: Task, candidates: Sequence[Candidate], turns: int) -> list[Outcome]:
        if self._bench is None or self._bench.task is not task:
            self._bench = None  # its memory goes before that of the next is taken
            torch.cuda.empty_cache()
            self._bench = _Bench(task, self._context, self._cache_bytes)
        bench = self._bench
        outcomes: dict[Candidate, Outcome] = {}
        timed: list[tuple[Candidate, list[_Timed]]] = []
        for candidate in candidates:
            try:
                wrong = bench.wrong(candidate)
                if wrong:
                    outcomes[candidate] = Outcome("wrong", wrong)
                else:
                    timed.append((candidate, bench.timed(candidate)))
            except Exception as error:  # compilers and launches raise what they like
                outcomes[candidate] = Outcome("failed", first_line(error))
                try:
                    torch.cuda.synchronize()
                except Exception:
                    raise DeviceLost(candidate, first_line(error)) from error
        # Each has run before, so what fails has been found.
        bodies = [one.replay for _, calls in timed for one in calls]
        times = iter(interleaved(bodies, turns)) if bodies else iter(())
        for candidate, calls in timed:
            outcomes[candidate] = Outcome(
                "ok",
                "",
                {one.label: [t / one.launches for t in next(times)] for one in calls},
            )
        return [outcomes[candidate] for candidate in candidates]


class _Timed:
    """A captured graph of a candidate's launches, and all that it reads and writes."""

    def __init__(self, call: Call, candidate: Candidate, copies: Sequence[Arguments]) -> None:
        self.label = call.label
        self.launches = max(len(copies), _LAUNCHES)
        self._bound = [Bound(call, candidate, arguments) for arguments in copies]

        def body() -> None:
            for index in range(self.launches):
                self._bound[index % len(self._bound)].run()

        self._graph = captured(body)
        self.replay: Callable[[], object] = self._graph.replay
        self.replay()
        torch.cuda.synchronize()


class _Bench:
    """Arguments and oracles of one task's calls.

    Raises:
        DeviceMemoryError: one set of arguments does not fit.
    """

    def __init__(self, task: Task, context: int, cache_bytes: int) -> None:
        self.task = task
        self._copies: dict[str, list[Arguments]] = {call.label: [] for call in task.calls}
        self._oracles: dict[str, Results] = {}
        try:
            self._fill(Inputs("cuda", context), cache_bytes)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"{task.name}: expected room for its tensors on the device, got {error}"
            ) from error
        # Timing changes the state of all copies; checks begin with this.
        self._state = {
            call.label: mapped(
                {name: self._copies[call.label][0][name] for name in get_op(call.op).updated},
                torch.clone,
            )
            for call in task.calls
        }

    def _fill(self, inputs: Inputs, cache_bytes: int) -> None:
        """Copies that are together larger than the cache, as far as memory goes."""
        free, _ = torch.cuda.mem_get_info()
        start = torch.cuda.memory_allocated()
        for copy in range(_MOST_COPIES):
            # One set of weights for all calls of a copy.
            weights: dict[Any, Tensor] = {}
            for call in self.task.calls:
                self._copies[call.label].append(inputs.make(call, weights))
            taken = torch.cuda.memory_allocated() - start
            smallest = min(sum(map(_nbytes, copies)) for copies in self._copies.values())
            if copy and smallest > 2 * cache_bytes:
                break
            if taken * (copy + 2) / (copy + 1) > _SHARE * free:
                break

    def wrong(self, candidate: Candidate) -> str:
        """What is wrong with a candidate's results, of any call."""
        for call in self.task.calls:
            arguments = {**self._copies[call.label][0], **self._state[call.label]}
            if call.label not in self._oracles:
                self._oracles[call.label] = oracle(call, arguments)
                torch.cuda.empty_cache()
            expected = self._oracles[call.label]
            found = check(call, self.task.space, candidate, arguments, expected)
            if found:
                return found
        return ""

    def timed(self, candidate: Candidate) -> list[_Timed]:
        """Graphs of a candidate's calls."""
        return [_Timed(call, candidate, self._copies[call.label]) for call in self.task.calls]


def _nbytes(arguments: Arguments) -> int:
    return sum(v.numel() * v.element_size() for value in arguments.values() for v in each(value))


def measurer_on(card: Card, *, context: int, workers: int, identity: Identity) -> CudaMeasurer:
    """The measurer of a worker, which sees one device.

    Args:
        context, workers: of `CudaMeasurer`.
        identity: what the device must be.

    Raises:
        OptionError: the device is another one than the card.
    """
    found = device_identity(), card_uuid(torch.cuda.current_device())
    if found != (identity, card.uuid):
        raise OptionError(
            f"device {card.index}: expected {identity.device} {card.uuid} in its worker, got "
            f"{found[0].device} {found[1]}; set CUDA_VISIBLE_DEVICES to the devices that are meant"
        )
    return CudaMeasurer(context, workers)
