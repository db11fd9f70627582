"""build: the profile of declared graphs, or of rounds that were started.

`declared_profile` needs no weights and no device: graphs, kernels' choices, plans and floors.
`started_profile` adds what a start-up knows, and times where somebody measured them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dflash_graph.choices import Choices
from dflash_graph.executors import compile_segments
from dflash_graph.graph import Backend
from dflash_graph.kernels import KernelCase
from dflash_graph.models.pair import ModelPair
from dflash_graph.models.round import declare_startup, declare_state
from dflash_graph.profile.acceptance import counts_of
from dflash_graph.profile.document import Profile
from dflash_graph.profile.executor import Resources, Setting, executor_profile, lowering_of
from dflash_graph.profile.identity import device_of, identity_of, this_device
from dflash_graph.profile.measured import ExecutorTimes
from dflash_graph.profile.memory import actual_memory, planned_memory
from dflash_graph.profile.parts import Ceiling, DeviceIdentity, KernelResources, Stage
from dflash_graph.rounds import Rounds
from dflash_graph.state import Capacities, plan_state
from dflash_graph.statistics import Statistics

#: TB/s that floors stand on where nobody states or measures a ceiling: what an H200's memory gives
#: to loads.
READ_CEILING: Final = 4.6


def declared_profile(
    pair: ModelPair,
    backend: Backend,
    *,
    name: str,
    draft_tokens: int,
    max_batch: int,
    max_context: int,
    prefill_chunk: int = 1024,
    context: int = 0,
    ceiling: Ceiling | None = None,
    choices: Choices | None = None,
    resources: Resources | None = None,
) -> Profile:
    """The profile of a start-up that nobody made yet.

    Args:
        pair: target and draft.
        backend: the lowering of rounds.
        name: of the pair, for people.
        draft_tokens: K; 0 for plain decoding.
        max_batch: executors are profiled for every B from 1 to this.
        max_context: tokens of a request.
        prefill_chunk: tokens of a prefill pass.
        context: tokens before the block that costs are for.
        ceiling: what floors stand on.
        choices: of the device that kernels are for.
        resources: compiles kernels; without it the profile says nothing of registers.

    Raises:
        OptionError: a number is out of range.
        UnsupportedModelError: the target has no graph yet.
    """
    segments = declare_startup(
        pair,
        backend,
        draft_tokens=draft_tokens,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
    )
    capacities = Capacities(max_batch, max_context)
    ceiling = ceiling or Ceiling(read_tb_per_s=READ_CEILING)
    setting = Setting(context, ceiling, choices, capacities.bindings(), resources)
    compiled = {
        label: compile_segments(graphs, capacities, choices) for label, graphs in segments.items()
    }
    device: DeviceIdentity = device_of(choices, "cuda" if backend == "triton" else "cpu")
    return Profile(
        identity=identity_of(
            pair,
            name=name,
            device=device,
            options={
                "lowering": backend,
                "draft_tokens": draft_tokens,
                "max_batch": max_batch,
                "max_context": max_context,
                "prefill_chunk": prefill_chunk,
                "dtype": pair.dtype,
                "context": context,
            },
            choices=choices,
        ),
        ceiling=ceiling,
        executors=tuple(
            executor_profile(label, found, setting, lowering_of(found))
            for label, found in compiled.items()
        ),
        memory=planned_memory(
            plan_state(declare_state(pair, draft_tokens + 1), capacities),
            compiled.values(),
        ),
    )


def started_profile(
    rounds: Rounds,
    *,
    name: str,
    context: int = 0,
    ceiling: Ceiling | None = None,
    times: Mapping[str, ExecutorTimes] | None = None,
    statistics: Statistics | None = None,
    ms_per_round: float | None = None,
    resources: Resources | None = None,
) -> Profile:
    """The profile of rounds that were started.

    Args:
        rounds: compiled.
        name: of the pair, for people.
        context: tokens before the block that costs are for, and times if there are any.
        ceiling: what floors stand on.
        times: of executors that were timed, by name.
        statistics: of an engine that ran them.
        ms_per_round: wall time of one of its rounds.
        resources: compiles kernels.
    """
    pair = rounds.model.pair
    ceiling = ceiling or Ceiling(read_tb_per_s=READ_CEILING)
    setting = Setting(context, ceiling, rounds.choices, rounds.capacities.bindings(), resources)
    bound = rounds.executors()
    is_cuda = rounds.arena.is_cuda
    executors = []
    for label, executor in bound.items():
        is_prefill = label.startswith("prefill")
        lowering = lowering_of(executor.compiled)
        if is_prefill and is_cuda and rounds.backend != "eager":
            lowering = "library"
        known = executor_profile(
            label, executor.compiled, setting, lowering, (times or {}).get(label)
        )
        cost = rounds.captures.get(label)
        executors.append(
            known.model_copy(
                update={
                    "captured": executor.is_captured,
                    "replays": executor.runs,
                    "capture_seconds": None if cost is None else cost.seconds,
                    "graph_bytes": None if cost is None else cost.nbytes,
                }
            )
        )
    loaded = rounds.model.load_seconds
    startup = {} if loaded is None else {"weights": loaded}
    return Profile(
        identity=identity_of(
            pair,
            name=name,
            device=this_device("cuda" if is_cuda else "cpu"),
            options={**rounds.options.model_dump(), "context": context},
            choices=rounds.choices,
        ),
        ceiling=ceiling,
        executors=tuple(executors),
        memory=actual_memory(rounds),
        startup=tuple(
            Stage(name=stage, seconds=seconds)
            for stage, seconds in {**startup, **rounds.startup}.items()
        ),
        acceptance=None if statistics is None else counts_of(statistics, ms_per_round),
    )


def compiled_resources(capability: int) -> Resources:
    """Compiles kernels for a compute capability; needs triton, and minutes for a large pair."""
    from dflash_graph.ahead_of_time import compile_case

    known: dict[KernelCase, tuple[KernelResources, ...]] = {}

    def resources(case: KernelCase) -> tuple[KernelResources, ...]:
        if case not in known:
            known[case] = tuple(
                KernelResources(
                    kernel=found.kernel,
                    registers=found.registers,
                    shared_bytes=found.shared,
                    spill_bytes=found.local,
                )
                for found in compile_case(case, capability)
            )
        return known[case]

    return resources
