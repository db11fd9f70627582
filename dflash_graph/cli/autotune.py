"""`autotune`: measure kernel choices on this machine's GPUs, and look after what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.autotune_run import RUN, Geometry, MaxBatch, run
from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.cli.selection import Dtype, GraphDraftTokens, GraphDtype, select_pair
from dflash_graph.options import MAX_BATCH

if TYPE_CHECKING:
    from dflash_graph.choices import Choices
    from dflash_graph.profile_store import Layer

NAME: Final = "autotune"
SHORT: Final = "Measure kernel choices on a GPU, and look after them."
_OWN: Final = """\b
Examples:
  dflash-graph autotune run --help
  dflash-graph autotune status"""
_EXAMPLES: Final[dict[str, str]] = {
    "run": RUN,
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
Profile = Annotated[str, typer.Argument(metavar="PROFILE", help="A file, or one that ships.")]

app.command("run", short_help="Measure, on this machine's GPUs.", epilog=RUN)(run)


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
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only profiles of this device. Default: of all."),
    ] = None,
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
        layers = _of_device(layers, device)
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


def _of_device(layers: Sequence[Layer], device: str) -> tuple[Layer, ...]:
    from dflash_graph.errors import OptionError

    names = {layer.source: layer.choices.device for layer in layers if layer.choices}
    found = tuple(
        layer for layer in layers if names.get(layer.source, "").lower() == device.lower()
    )
    if not found:
        known = ", ".join(sorted(map(repr, set(names.values())))) or "none"
        raise OptionError(
            f"device: expected one that there are profiles of ({known}), got {device!r}"
        )
    return found


def _require_device(choices: Choices, identity: Any) -> None:
    from dflash_graph.errors import ProfileError
    from dflash_graph.profile_store import device_difference

    wrong = device_difference(choices, identity)
    if wrong is not None:
        raise ProfileError(
            f"{choices.source}: expected a profile of {wrong.field} {wrong.here}, "
            f"got {wrong.stored}"
        )
