"""Rounds over random state, timed on the device."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dflash_graph.ahead_of_time import precompile
from dflash_graph.bench.timing import captured, interleaved, medians
from dflash_graph.choices import Choices
from dflash_graph.errors import OptionError
from dflash_graph.executors import RoundExecutor, compile_segments, new_arena
from dflash_graph.kernels import cases_of
from dflash_graph.lowering.segment import Launch
from dflash_graph.models.pair import PAGE_SIZE
from dflash_graph.rounds import Model, Rounds


@dataclass(frozen=True)
class RoundTimes:
    """Median device times of one round, in microseconds.

    Args:
        batch: B.
        context: tokens before the block.
        forward: materialize, propose, verify, accept; the frame in and the results out.
        finish: the commit of a whole block.
        total: both, one after the other.
        spread: half the distance between the quartiles of `total`.
        ops: (op, launches, microseconds of all of them), each op's launches replayed alone.
    """

    batch: int
    context: int
    forward: float
    finish: float
    total: float
    spread: float
    ops: tuple[tuple[str, int, float], ...] = ()


def fill_state(rounds: Rounds, seed: int = 0) -> None:
    """Give every pool random values of plausible size, as if requests had come so far."""
    generator = torch.Generator(rounds.arena.device).manual_seed(seed)
    for name, tensor in rounds.state.tensors.items():
        if tensor.is_floating_point():
            tensor.normal_(0.0, 0.02 if "gdn_state" in name else 1.0, generator=generator)


def require_context(rounds: Rounds, context: int) -> None:
    """Refuse tokens before a block that leave no room for a block before them or after.

    Raises:
        OptionError: names what fits.
    """
    room = rounds.capacities.context - rounds.columns
    if not rounds.columns <= context <= room:
        raise OptionError(
            f"context: expected {rounds.columns}..{room} tokens (a block before it, a block within "
            f"max_context), got {context}"
        )


def round_frame(rounds: Rounds, batch: int, context: int) -> dict[str, Any]:
    """Frame fields of a round of `batch` requests that have processed `context` tokens each, the
    last block of them in the round before.

    Raises:
        OptionError: the context does not fit, or lies before the first block.
    """
    require_context(rounds, context)
    width = rounds.columns
    pages = -(-(context + width) // PAGE_SIZE)
    per_request = rounds.capacities.request_pages
    tables = [
        [b * per_request + i if i < pages else -1 for i in range(per_request)] for b in range(batch)
    ]
    positions = [[context + i for i in range(width)]] * batch
    fields: dict[str, Any] = {
        "slots": list(range(batch)),
        "page_table": tables,
        "anchor": [1 + b for b in range(batch)],
        "frontier": [context] * batch,
        "live_drafts": [width - 1] * batch,
        "live_columns": [width] * batch,
        "positions": [positions] * 3,
        "context_frontier": [context - width] * batch,
        "pending": [width] * batch,
        "context_positions": [[[context - width + i for i in range(width)]] * batch],
        "draft_positions": [positions],
        "draft_columns": [width] * batch,
        "temperature": [0.0] * batch,
        "top_k": [0] * batch,
        "top_p": [1.0] * batch,
        "min_p": [0.0] * batch,
        "presence": [0.0] * batch,
        "frequency": [0.0] * batch,
        "seed": [[b, 0] for b in range(batch)],
    }
    return fields


def play_round(
    executor: RoundExecutor,
    rounds: Rounds,
    batch: int,
    context: int,
    sampling: dict[str, Any] | None = None,
) -> None:
    """One round of `round_frame` that commits the whole block.

    Args:
        sampling: sampling values by field.
    """
    fields = round_frame(rounds, batch, context) | (sampling or {})
    executor.forward({name: v for name, v in fields.items() if name in executor.inputs})
    executor.finish([rounds.columns] * batch)


def round_with(
    choices: Choices, rounds: Rounds, model: Model, batch: int, context: int
) -> RoundExecutor:
    """The round of kernels of one exact batch with other choices, captured, in an arena of its own.

    Args:
        choices: for kernels; `rounds` has those in use.
        rounds: of the lowering `triton`, on a CUDA device; the round shares its state.
        model: what `rounds` were compiled for.
    """
    compiled = compile_segments(rounds[batch].compiled.graphs, rounds.capacities, choices)
    precompile(cases_of(compiled.graphs, choices), choices.capability)
    arena = new_arena([compiled.plan], "cuda")
    made = RoundExecutor(compiled, arena, model.weights, rounds.state.tensors, "triton")
    play_round(made, rounds, batch, context)
    made.capture(torch.cuda.Stream())
    return made


def measure_round(
    rounds: Rounds,
    batch: int,
    context: int,
    *,
    turns: int = 30,
    ops: bool = False,
    sampling: dict[str, Any] | None = None,
) -> RoundTimes:
    """Time the round of one exact batch; every round commits the whole block.

    Args:
        rounds: on a CUDA device, with room for `context` and a block.
        batch: B.
        context: tokens before the block.
        turns: rounds that are timed.
        ops: also replay the launches of each op alone.
        sampling: sampling values by field; the sampling executor then runs.

    Raises:
        OptionError: launches of ops were asked of a lowering that compiles several ops as one, or
            that cannot be captured.
    """
    if ops:
        require_launches(rounds.backend)
    executor = rounds[batch] if sampling is None else rounds.sampling[batch]
    play_round(executor, rounds, batch, context, sampling)
    parts = [lambda index=index: executor.run_queued(index) for index in range(2)]
    times = interleaved(parts, turns)
    totals = [sum(pair) for pair in zip(*times, strict=True)]
    quartiles = statistics.quantiles(totals, n=4)
    return RoundTimes(
        batch,
        context,
        statistics.median(times[0]),
        statistics.median(times[1]),
        statistics.median(totals),
        (quartiles[2] - quartiles[0]) / 2,
        _op_times(executor, turns) if ops else (),
    )


def require_launches(lowering: str) -> None:
    """Refuse times of single ops where they are no launches that can be captured.

    Raises:
        OptionError: the lowering is not triton.
    """
    if lowering != "triton":
        raise OptionError(
            f"ops: expected lowering 'triton' (its ops are launches of their own), got {lowering!r}"
        )


def _op_times(executor: RoundExecutor, turns: int) -> tuple[tuple[str, int, float], ...]:
    """Launches of each op and weight shape, replayed alone in one graph."""
    groups: dict[str, list[Launch]] = defaultdict(list)
    for segment in executor.segments:
        for launch in segment.launches:
            (node,) = launch.step.nodes
            shapes = [
                "x".join(map(str, executor.tensors[name].shape))
                for argument, name in node.operands()
                if node.contract.inputs[argument].kind == "weight"
                and executor.tensors[name].dim() == 2
            ]
            groups[" ".join([node.op, *dict.fromkeys(shapes)])].append(launch)

    def all_of(launches: list[Launch]) -> Callable[[], None]:
        def run() -> None:
            for launch in launches:
                launch.run()

        return run

    graphs = [captured(all_of(launches)) for launches in groups.values()]
    times = medians([graph.replay for graph in graphs], turns)
    rows = [
        (name, len(launches), time)
        for (name, launches), time in zip(groups.items(), times, strict=True)
    ]
    return tuple(sorted(rows, key=lambda row: -row[2]))
