"""`autotune run`: what the rounds of a geometry launch, measured on one GPU or on several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dflash_graph.cli.autotune_progress import progress, shared_progress
from dflash_graph.cli.output import AsJson, print_error, print_json, write
from dflash_graph.cli.selection import (
    Draft,
    Dtype,
    GraphDraftTokens,
    GraphDtype,
    Target,
    select_pair,
)
from dflash_graph.options import MAX_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_graph.autotune import Task
    from dflash_graph.autotune.cards import Card
    from dflash_graph.autotune.crew import Tuned
    from dflash_graph.choices import Choices
    from dflash_graph.profile_store import Identity

RUN: Final = """\b
Examples:
  dflash-graph autotune run --geometry qwen3.5-27b-dflash2 --budget 600s
  dflash-graph autotune run --geometry qwen3.5-27b-dflash2 --devices 0,1
  dflash-graph autotune run --geometry demo-dflash2 --op linear_norm --json
  dflash-graph autotune run --geometry demo-dflash2 --draft-tokens 15 --list"""

Geometry = Annotated[
    str | None, typer.Option("--geometry", metavar="NAME", help="A shipped pair of configs.")
]
MaxBatch = Annotated[
    int, typer.Option(min=1, max=MAX_BATCH, metavar="N", help="Rounds of every B from 1 to this.")
]


def _seconds(text: str) -> float:
    from dflash_graph.autotune.budget import seconds

    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def run(
    geometry: Geometry = None,
    target: Target = None,
    draft: Draft = None,
    op: Annotated[
        list[str] | None,
        typer.Option("--op", metavar="OP", help="Only this op; repeat for several."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="0,1",
            help="CUDA devices of one kind that share the work. Default: the current one.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Begin no measurement after this: 600s, 10m, 1h."),
    ] = None,
    draft_tokens: GraphDraftTokens = None,
    max_batch: MaxBatch = MAX_BATCH,
    dtype: GraphDtype = Dtype.bfloat16,
    context: Annotated[
        int, typer.Option(min=16, metavar="N", help="Tokens of each request before the round.")
    ] = 2048,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where winners go. Default: the user's profile of the device."
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What is measured. Default: beside the user's profiles."),
    ] = None,
    is_list: Annotated[
        bool, typer.Option("--list", help="Only list what would be tuned; needs no GPU.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the rounds of a geometry launch, and store what is faster.

    Candidates are checked against the float64 reference, and must give a row the same bits for any
    number of rows. One replaces what runs now only where it is faster by more than the noise. What
    is measured is kept in a journal: the same command goes on where it was interrupted.
    """
    seconds = None if budget is None else _seconds(budget)
    if (geometry is None) == (target is None):
        raise typer.BadParameter("give either --geometry or --target")
    from dflash_graph.autotune.cards import find_cards, parse_indices
    from dflash_graph.autotune.tasks import find_tasks

    indices = None if devices is None else parse_indices(devices)
    pair, tokens = select_pair(geometry, target, draft, draft_tokens, dtype)
    find = partial(find_tasks, pair, draft_tokens=tokens, max_batch=max_batch, ops=tuple(op or ()))
    if is_list:
        _list(find(), as_json)
        return
    from dflash_graph.autotune.journal import Journal
    from dflash_graph.autotune.session import journal_path
    from dflash_graph.profile_store import lookup, user_file

    identity = _identity()
    cards: tuple[Card, ...] = ()
    if indices is not None:
        cards, identity = find_cards(indices)
    kept = Journal(journal or journal_path(identity))
    path = profile or user_file(identity.device, identity.capability)
    choices = lookup(identity, path if profile is not None and profile.exists() else None)
    if cards:
        found = _on_cards(cards, find, identity, kept.path, choices, path, seconds, context)
        measured = sum(tuned.measured for tuned in found)
        decisions = [tuned.decision for tuned in found]
        rows = [tuned.document() for tuned in found]
    else:
        from dflash_graph.autotune.device import CudaMeasurer
        from dflash_graph.autotune.session import tune
        from dflash_graph.autotune.tuner import Tuner

        tasks = find()
        tuner = Tuner(CudaMeasurer(context), kept, identity, seconds)
        with progress(tuner, tasks) as began:
            decisions = list(tune(tasks, tuner, choices, path, began=began))
        measured = tuner.measured
        rows = [decision.document() for decision in decisions]
    failed = sum(decision.result == "failed" for decision in decisions)
    if as_json:
        print_json(
            {
                "device": identity.device,
                "capability": identity.capability,
                "versions": dict(identity.versions),
                **({"devices": list(indices)} if indices is not None else {}),
                "profile": str(path),
                "journal": str(kept.path),
                "measured": measured,
                "tasks": rows,
            }
        )
    else:
        from dflash_graph.autotune.report import decisions_text

        write(decisions_text(decisions))
        won = sum(decision.result == "won" for decision in decisions)
        write(f"\n{measured} measurements made; {won} choices stored in {path}\n")
        if any(decision.result == "unfinished" for decision in decisions):
            write("the budget ended: the same command goes on from here\n")
    if failed:
        print_error(
            f"autotune run: expected {len(decisions)} tasks to be decided, got {failed} that "
            f"failed; the same command tries them again"
        )
        raise typer.Exit(1)


def _identity() -> Identity:
    from dflash_graph.errors import OptionError
    from dflash_graph.profile_store import device_identity

    try:
        return device_identity()
    except OptionError:
        raise OptionError(
            "autotune run: expected a CUDA device to measure on, got none (torch sees no CUDA "
            "device); --list and the other commands need none"
        ) from None


def _on_cards(
    cards: tuple[Card, ...],
    find: Callable[[], tuple[Task, ...]],
    identity: Identity,
    journal: Path,
    choices: Choices,
    path: Path,
    seconds: float | None,
    context: int,
) -> list[Tuned]:
    """Tasks that several devices share, as they were found."""
    from dflash_graph.autotune import device
    from dflash_graph.autotune.crew import Crew
    from dflash_graph.autotune.session import tune_together
    from dflash_graph.autotune.worker import Setup

    tasks = find()
    measurer = partial(device.measurer_on, context=context, workers=len(cards), identity=identity)
    with (
        Crew(cards, Setup(measurer, find, journal, identity), seconds) as crew,
        shared_progress(crew, len(tasks)),
    ):
        found = list(tune_together(tasks, crew, choices, path))
    return sorted(found, key=lambda tuned: tuned.index)


def _list(tasks: tuple[Task, ...], as_json: bool) -> None:
    from dflash_graph.autotune.report import launches_text
    from dflash_graph.report import size_text

    launches = [sum(max(c.launches for c in part.calls) for part in t.parts) for t in tasks]
    if as_json:
        rows = [
            {
                "task": task.name,
                "row_tiles": list(task.buckets),
                "launches": count,
                "bytes": task.weight,
            }
            for task, count in zip(tasks, launches, strict=True)
        ]
        print_json({"tasks": rows})
        return
    for task, count in zip(tasks, launches, strict=True):
        tiles = " ".join(map(str, task.buckets))
        write(
            f"{task.name}\n  {launches_text(count)}, {size_text(task.weight)}, row tiles {tiles}\n"
        )
