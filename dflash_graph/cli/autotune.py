"""`autotune`: measure kernel choices on this machine's GPU, and look after what was measured."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.cli.selection import Dtype, GraphDraftTokens, GraphDtype, select_pair
from dflash_graph.options import MAX_BATCH

if TYPE_CHECKING:
    from dflash_graph.autotune import Decision, Task, Tuner
    from dflash_graph.choices import Choices

NAME: Final = "autotune"
SHORT: Final = "Measure kernel choices on a GPU, and look after them."
_OWN: Final = """\b
Examples:
  dflash-graph autotune run --help
  dflash-graph autotune status"""
_EXAMPLES: Final[dict[str, str]] = {
    "run": """\b
Examples:
  dflash-graph autotune run --geometry qwen3.5-27b-dflash2 --budget 600s
  dflash-graph autotune run --geometry demo-dflash2 --op linear_norm --json
  dflash-graph autotune run --geometry demo-dflash2 --draft-tokens 15 --list""",
    "status": """\b
Examples:
  dflash-graph autotune status --json
  dflash-graph autotune status --geometry qwen3.5-27b-dflash2 --device "NVIDIA H200\"""",
    "show": """\b
Examples:
  dflash-graph autotune show
  dflash-graph autotune show nvidia-h200.json --json""",
    "diff": """\b
Examples:
  dflash-graph autotune diff nvidia-h200.json CHOICES""",
    "merge": """\b
Examples:
  dflash-graph autotune merge MERGED CHOICES nvidia-h200.json""",
    "prune": """\b
Examples:
  dflash-graph autotune prune --dry-run
  dflash-graph autotune prune CHOICES""",
    "export": """\b
Examples:
  dflash-graph autotune export - --device "NVIDIA H200"
  dflash-graph autotune export EXPORTED --device "NVIDIA H200\"""",
}
#: The examples of all its commands.
EPILOG: Final = "\n".join((_OWN, *_EXAMPLES.values()))

app = typer.Typer(
    name=NAME,
    help="Measure kernel choices on a GPU, and look after what was measured.\n\n"
    "Choices are looked up in a file that is named, in the user's folder and among those that "
    "ship, in this order. An engine never measures. Only `run` needs a GPU.",
    short_help=SHORT,
    epilog=_OWN,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Geometry = Annotated[
    str | None, typer.Option("--geometry", metavar="NAME", help="A shipped pair of configs.")
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A device by its name. Default: this machine's, else the only one that profiles are "
        "of.",
    ),
]
File = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="A profile that goes before all others."),
]
MaxBatch = Annotated[
    int, typer.Option(min=1, max=MAX_BATCH, metavar="N", help="Rounds of every B from 1 to this.")
]
Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="A file, or one that ships.")]

_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS: Final = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    found = _TIME.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"expected a time such as 600s, 10m or 1h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


@app.command("run", short_help="Measure, on this machine's GPU.", epilog=_EXAMPLES["run"])
def run(
    geometry: Geometry = None,
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A target's directory.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(metavar="DIR", help="A draft's directory.")] = None,
    op: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Only this op; repeat for several.")
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
    pair, tokens = select_pair(geometry, target, draft, draft_tokens, dtype)
    from dflash_graph.autotune.tasks import find_tasks

    if is_list:
        tasks = find_tasks(pair, draft_tokens=tokens, max_batch=max_batch, ops=op or ())
        _list(tasks, as_json)
        return
    from dflash_graph.autotune.session import journal_path, tune
    from dflash_graph.errors import OptionError
    from dflash_graph.profile_store import device_identity, lookup, user_file

    try:
        identity = device_identity()
    except OptionError:
        raise OptionError(
            "autotune run: expected a CUDA device to measure on, got none (torch sees no CUDA "
            "device); --list and the other commands need none"
        ) from None
    tasks = find_tasks(pair, draft_tokens=tokens, max_batch=max_batch, ops=op or ())
    from dflash_graph.autotune.device import CudaMeasurer
    from dflash_graph.autotune.journal import Journal
    from dflash_graph.autotune.tuner import Tuner

    kept = Journal(journal or journal_path(identity))
    path = profile or user_file(identity.device, identity.capability)
    choices = lookup(identity, path if profile is not None and profile.exists() else None)
    tuner = Tuner(CudaMeasurer(context), kept, identity, seconds)
    decisions: list[Decision] = []
    with _progress(tuner, tasks) as began:
        for decision in tune(tasks, tuner, choices, path, began=began):
            decisions.append(decision)
    if as_json:
        print_json(
            {
                "device": identity.device,
                "capability": identity.capability,
                "versions": dict(identity.versions),
                "profile": str(path),
                "journal": str(kept.path),
                "measured": tuner.measured,
                "tasks": [decision.document() for decision in decisions],
            }
        )
        return
    from dflash_graph.autotune.report import decisions_text

    write(decisions_text(decisions))
    won = sum(decision.result == "won" for decision in decisions)
    write(f"\n{tuner.measured} measurements made; {won} choices stored in {path}\n")
    if any(decision.result == "unfinished" for decision in decisions):
        write("the budget ended: the same command goes on from here\n")


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


_Say = Callable[[str, int, int, float], None]


class _Began:
    """Notes what is being tuned and says how long it may take.

    Args:
        say: takes what is tuned, candidates done, their number, and seconds left.
    """

    def __init__(self, tuner: Tuner, tasks: tuple[Task, ...], say: _Say) -> None:
        self._tuner = tuner
        self._tasks = tasks
        self._say = say
        self._index = 0
        self._start = time.monotonic()
        tuner.progress = self.progress

    def __call__(self, index: int, task: Task) -> None:
        self._index = index

    def progress(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        share = (self._index + done / max(1, total)) / len(self._tasks)
        left = (now - self._start) * (1 - share) / share if share else float("inf")
        left = min(left, self._tuner.left)
        self._say(f"{self._index + 1} of {len(self._tasks)}  {name}", done, total, left)


def _lines() -> _Say:
    """Says a line on stderr now and then."""
    said = time.monotonic()

    def say(what: str, done: int, total: int, left: float) -> None:
        nonlocal said
        now = time.monotonic()
        if done and now - said < 10.0:
            return
        said = now
        typer.echo(f"{what}: {done} of {total} candidates{_left(left)}", err=True)

    return say


def _left(seconds: float) -> str:
    if seconds == float("inf"):
        return ""
    seconds = max(0.0, seconds)
    return f", {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"


@contextmanager
def _progress(tuner: Tuner, tasks: tuple[Task, ...]) -> Iterator[_Began]:
    """Lines on stderr, on a terminal one that changes."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("tuning") as status:

            def say(what: str, done: int, total: int, left: float) -> None:
                status.update(f"{what}: {done} of {total}{_left(left)}")

            yield _Began(tuner, tasks, say)
    else:
        yield _Began(tuner, tasks, _lines())


@app.command("status", short_help="What there is.", epilog=_EXAMPLES["status"])
def status(
    geometry: Geometry = None,
    device: Device = None,
    draft_tokens: GraphDraftTokens = None,
    max_batch: MaxBatch = MAX_BATCH,
    dtype: GraphDtype = Dtype.bfloat16,
    profile: File = None,
    as_json: AsJson = False,
) -> None:
    """Show where profiles are looked for and what is there.

    With --geometry: the choice of everything that its rounds launch, and where it comes from.
    """
    from dflash_graph.autotune import report

    if geometry is None:
        from dflash_graph.profile_store import user_folder

        found = report.status_report(sorted(user_folder().glob("journal/*.jsonl")))
        text = report.status_text
    else:
        from dflash_graph.autotune.tasks import find_tasks

        pair, tokens = select_pair(geometry, None, None, draft_tokens, dtype)
        tasks = find_tasks(pair, draft_tokens=tokens, max_batch=max_batch)
        found = report.coverage(tasks, report.identity_for(device), profile)
        text = report.coverage_text
    if as_json:
        print_json(found)
    else:
        write(text(found))


@app.command("show", short_help="Entries of profiles.", epilog=_EXAMPLES["show"])
def show(
    profile: Annotated[
        str | None,
        typer.Argument(metavar="PROFILE", help="A file, or one that ships. Default: all."),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show entries, whether each is used, and in what it differs from what runs here."""
    from dflash_graph.autotune.report import layer_report, show_text
    from dflash_graph.profile_store import Layer, all_layers

    layers: tuple[Layer, ...]
    if profile is None:
        layers = all_layers()
    else:
        found = _named(profile)
        is_file = Path(profile).exists()
        layers = (Layer("explicit" if is_file else "shipped", found.source, found),)
    if device is not None:
        layers = tuple(
            layer
            for layer in layers
            if layer.choices and layer.choices.device.lower() == device.lower()
        )
    reports = [layer_report(layer) for layer in layers]
    if as_json:
        print_json({"profiles": reports})
    else:
        write(show_text(reports))


@app.command("diff", short_help="What differs between two.", epilog=_EXAMPLES["diff"])
def diff(
    old: Profile,
    new: Profile,
    as_json: AsJson = False,
) -> None:
    """Show which entries were added, removed or changed."""
    from dflash_graph.autotune.report import changes, changes_text

    found = changes(_named(old), _named(new))
    if as_json:
        print_json(found)
    else:
        write(changes_text(found))


@app.command("merge", short_help="Put several into one.", epilog=_EXAMPLES["merge"])
def merge(
    into: Annotated[Path, typer.Argument(metavar="FILE", help="The file to make or extend.")],
    profiles: Annotated[
        list[str], typer.Argument(metavar="PROFILE...", help="Files, or profiles that ship.")
    ],
    as_json: AsJson = False,
) -> None:
    """Merge profiles of one device into a file; of entries with one key the last one stays."""
    from dflash_graph.autotune.report import merge_report
    from dflash_graph.profile_store import Identity, read_profile, save

    given = [_named(name) for name in profiles]
    identity = Identity(given[0].device, given[0].capability)
    for choices in given:
        _require_device(choices, identity)
    entries, found = merge_report(read_profile(into) if into.exists() else None, given)
    save(into, identity, entries, pdl=given[0].pdl)
    if as_json:
        print_json({"profile": str(into), **found})
        return
    for mark, keys in (("+", found["added"]), ("~", found["replaced"])):
        for key in keys:
            write(f"{mark} {key}\n")
    write(f"{into}: {len(found['added'])} added, {len(found['replaced'])} replaced\n")


@app.command("prune", short_help="Remove what is not used.", epilog=_EXAMPLES["prune"])
def prune(
    profile: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A profile. Default: all in the user's folder."),
    ] = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="Also what other versions were measured with.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove entries of templates that have changed or are gone."""
    import json

    from dflash_graph.choices import entry_document, parse_choices
    from dflash_graph.profile_store import (
        Identity,
        all_layers,
        differences,
        read_profile,
        running_versions,
        update,
    )

    # A damaged file is an error where it is named, else it is left to the next save.
    of_user = (layer for layer in all_layers() if layer.name == "user" and layer.choices)
    paths = [profile] if profile is not None else [Path(layer.source) for layer in of_user]
    removed: list[dict[str, Any]] = []
    for path in paths:
        choices = read_profile(path)
        identity = Identity(choices.device, choices.capability, running_versions())

        def kept(
            document: dict[str, Any] | None, identity: Identity = identity, path: Path = path
        ) -> dict[str, Any] | None:
            if document is None:
                return None
            left = []
            entries = parse_choices(json.dumps(document), str(path)).entries
            for raw, entry in zip(document["choices"], entries, strict=True):
                why = [d for d in differences(entry, identity) if d.excludes or versions]
                if why:
                    removed.append(
                        {
                            "profile": str(path),
                            "entry": entry.key,
                            "why": [str(difference) for difference in why],
                            "document": entry_document(entry),
                        }
                    )
                else:
                    left.append(raw)
            if dry_run or len(left) == len(document["choices"]):
                return None
            return {**document, "choices": left}

        update(path, kept)
    if as_json:
        print_json({"removed": removed, "dry_run": dry_run})
        return
    for found in removed:
        write(f"- {found['entry']}\n")
        for why in found["why"]:
            write(f"    {why}\n")
    write(f"{len(removed)} entries {'would be ' if dry_run else ''}removed\n")


@app.command("export", short_help="What a device runs with, as one.", epilog=_EXAMPLES["export"])
def export(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The file to make; - for stdout.")],
    device: Device = None,
    profile: File = None,
) -> None:
    """Write what a device runs with as one profile, ready to be reviewed and shipped."""
    from dflash_graph.autotune.report import identity_for
    from dflash_graph.choices import choices_document
    from dflash_graph.errors import ProfileError
    from dflash_graph.profile_store import document_text, lookup, write_whole

    choices = lookup(identity_for(device), profile)
    text = document_text(choices_document(choices))
    if path == "-":
        write(text)
        return
    try:
        write_whole(Path(path).absolute(), text)
    except OSError as error:
        raise ProfileError(f"{path}: expected to write a profile, got {error.strerror}") from error
    write(f"{path}: {len(choices.entries)} entries of {choices.device}\n")


def _named(name: str) -> Choices:
    """A profile by its file, or by the name of one that ships."""
    from dflash_graph.choices import shipped_choices
    from dflash_graph.errors import ProfileError
    from dflash_graph.profile_store import read_profile

    if not Path(name).exists():
        shipped = {choices.source: choices for choices in shipped_choices()}
        if name in shipped:
            return shipped[name]
        raise ProfileError(
            f"{name}: expected a file or a profile that ships ({', '.join(shipped)}), got neither"
        )
    return read_profile(name)


def _require_device(choices: Choices, identity: Any) -> None:
    from dflash_graph.errors import ProfileError
    from dflash_graph.profile_store import device_difference

    wrong = device_difference(choices, identity)
    if wrong is not None:
        raise ProfileError(
            f"{choices.source}: expected a profile of {wrong.field} {wrong.here}, "
            f"got {wrong.stored}"
        )
