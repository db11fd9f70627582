"""Session: the tasks of a geometry tuned, on one device or several, winners stored as they are
found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dflash_graph.autotune.crew import Crew, Tuned
from dflash_graph.autotune.decision import Decision
from dflash_graph.autotune.tasks import Task
from dflash_graph.autotune.tuner import Tuner
from dflash_graph.choices import Choices, choices_for
from dflash_graph.profile_store import Identity, file_name, save, template_hash, user_folder


def journal_path(identity: Identity) -> Path:
    """The usual journal of a device."""
    name = file_name(identity.device, identity.capability).removesuffix(".json")
    return user_folder() / "journal" / f"{name}.jsonl"


def tune(
    tasks: Sequence[Task],
    tuner: Tuner,
    choices: Choices,
    path: Path,
    *,
    began: Callable[[int, Task], None] | None = None,
) -> Iterator[Decision]:
    """Decide tasks in order, and store each winner before the next task begins.

    Args:
        choices: what runs now.
        path: the profile that winners go to.
        began: called with the index of each task.

    Raises:
        ProfileError: the journal or the profile cannot be written.
        TuningError: the device was lost.
    """
    for index, task in enumerate(tasks):
        if began is not None:
            began(index, task)
        decision = tuner.tune(task, task.incumbent(choices))
        _store(decision, tuner.identity, choices, path)
        yield decision


def tune_together(
    tasks: Sequence[Task], crew: Crew, choices: Choices, path: Path
) -> Iterator[Tuned]:
    """Decide tasks on several cards, and store each winner; this process alone writes the profile.

    Args, raises: as `tune` and `Crew.decide`.
    """
    for tuned in crew.decide(tasks, choices):
        _store(tuned.decision, crew.setup.identity, choices, path)
        yield tuned


def _store(decision: Decision, identity: Identity, choices: Choices, path: Path) -> None:
    """Keep a winner in the profile."""
    if decision.result != "won" or decision.winner is None:
        return
    task = decision.task
    templates: Mapping[str, str | None] = {part.op: template_hash(part.op) for part in task.parts}
    entries = task.entries(
        decision.winner,
        templates=templates,
        versions=identity.versions,
        evidence=decision.evidence(),
    )
    # A file that is new says of all kernels what the device's profile said before.
    pdl = choices.pdl or choices_for(identity.device, identity.capability).pdl
    save(path, identity, entries, pdl=pdl)
