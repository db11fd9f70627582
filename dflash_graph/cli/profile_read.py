"""What reads profiles: `list`, `show`, `diff`, `lint`, `export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.errors import OptionError, ProfileError

if TYPE_CHECKING:
    from dflash_graph.profile.document import Profile
    from dflash_graph.profile.parts import ExecutorProfile

LIST: Final = """\b
Examples:
  dflash-graph profile list
  dflash-graph profile list PROFILES_DIR --json"""
SHOW: Final = """\b
Examples:
  dflash-graph profile show measured.json
  dflash-graph profile show measured.json --executor "round B=1" --by op
  dflash-graph profile show measured.json --node verify/layer.0/ffn/down"""
DIFF: Final = """\b
Examples:
  dflash-graph profile diff measured.json measured.json
  dflash-graph profile diff measured.json measured.json --fail-above 3%"""
LINT: Final = """\b
Examples:
  dflash-graph profile lint measured.json
  dflash-graph profile lint measured.json --ignore default-config --strict
  dflash-graph profile lint --rules"""
EXPORT: Final = """\b
Examples:
  dflash-graph profile export measured.json --format html -o profile.html
  dflash-graph profile export measured.json --format trace -o trace.json
  dflash-graph profile export --format schema"""

File = Annotated[Path, typer.Argument(metavar="FILE", help="A profile.", show_default=False)]


class By(StrEnum):
    """What a table's rows are."""

    region = "region"
    op = "op"
    node = "node"


class Format(StrEnum):
    """What a profile is exported as."""

    json = "json"
    html = "html"
    trace = "trace"
    schema = "schema"


def list_profiles(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where they lie.", show_default=False)
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the profiles of a folder; other JSON files are left out."""
    from dflash_graph.profile.document import SCHEMA, Profile
    from dflash_graph.report import text_table

    if not folder.is_dir():
        raise ProfileError(f"{folder}: expected a folder of profiles, got none")
    entries: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in sorted(folder.glob("*.json")):
        try:
            profile = Profile.load(path)
        except ProfileError as error:
            if is_named(path, SCHEMA):
                damaged.append(str(error))
            continue
        entries.append({"file": path.name, **_summary(profile)})
    if as_json:
        print_json({"profiles": entries, "damaged": damaged})
        return
    rows = [
        (
            entry["file"],
            entry["name"],
            entry["device"],
            entry["lowering"],
            str(entry["draft_tokens"]),
            str(entry["max_batch"]),
            "" if entry["round_us"] is None else f"{entry['round_us'] / 1e3:.3f}",
            entry["created"],
        )
        for entry in entries
    ]
    if rows:
        head = ("file", "pair", "device", "lowering", "K", "B", "round ms", "made")
        write(text_table(head, rows))
    elif not damaged:
        write(f"no profiles in {folder}\n")
    for line in damaged:
        write(f"damaged: {line}\n")


def show(
    file: File,
    executor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Such as 'round B=2'. Default: the first."),
    ] = None,
    by: Annotated[By, typer.Option("--by", help="What a row of the table is.")] = By.region,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Everything about one node instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print where a round's time and bytes go, which kernel runs there, and memory."""
    profile = load(file)
    from dflash_graph.profile import text

    chosen = _executor(profile, executor)
    if node is not None:
        found = text.find_node(chosen, node)[1]
        if as_json:
            print_json({**found.model_dump(mode="json"), "of_round": chosen.fraction(found)})
        else:
            write(text.node_text(chosen, node))
    elif as_json:
        print_json(
            {
                **_summary(profile),
                "executor": chosen.name,
                "floor_us": chosen.floor_us,
                "measured_us": None if chosen.measured is None else chosen.measured.median,
                "attributed_us": chosen.attributed_us,
                "unattributed_us": chosen.unattributed_us,
                "parts": text.parts(chosen, by.value),
                "memory": [found.model_dump(mode="json") for found in profile.memory],
                "startup": {stage.name: stage.seconds for stage in profile.startup},
            }
        )
    else:
        blocks = [
            text.head_text(profile),
            text.executors_text(profile),
            text.executor_text(chosen, by.value),
            text.memory_text(profile),
            text.startup_text(profile),
        ]
        write("\n".join(filter(None, blocks)))


def diff(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", help="A profile.", show_default=False)
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another.", show_default=False)],
    fail_above: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Exit with 1 if a round became slower by more, such as 3%."
        ),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=0, metavar="N", help="Lines of each list of nodes.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Compare two profiles: rounds, nodes, kernel choices, memory.

    A round counts as slower where its median is and, if it was repeated, the bootstrap interval of
    the ratio excludes noise. Rounds that were not both measured are compared by floor.
    """
    limit = None if fail_above is None else parse_share(fail_above)
    first, second = load(before), load(after)
    from dflash_graph.profile.change_text import difference_text
    from dflash_graph.profile.difference import difference

    found = difference(first, second)
    slower = () if limit is None else found.slower_than(limit)
    if as_json:
        rounds = [
            {**asdict(one), "ratio": one.ratio, "is_resolved": one.is_resolved}
            for one in found.rounds
        ]
        names = [one.executor for one in slower]
        print_json({**asdict(found), "rounds": rounds, "fail_above": limit, "slower": names})
    else:
        write(difference_text(found, nodes))
    if slower:
        worst = max(slower, key=lambda one: one.ratio)
        raise ProfileError(
            f"{worst.executor}: expected at most {fail_above} more than {before} "
            f"({worst.before:.2f} us), got {worst.after:.2f} us ({worst.ratio - 1:+.1%})"
        )


def lint(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A profile.", show_default=False)
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Leave out a rule; repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are errors too.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Print the rules instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what should not be in a profile. Exits with 1 if there is an error among it."""
    from dflash_graph.profile import lint as linting
    from dflash_graph.profile.change_text import findings_text
    from dflash_graph.report import text_table

    if rules:
        known = [(rule.id, rule.severity, rule.summary) for rule in linting.rules()]
        if as_json:
            print_json(
                [dict(zip(("id", "severity", "summary"), rule, strict=True)) for rule in known]
            )
        else:
            write(text_table(("rule", "severity", "what"), known))
        return
    if file is None:
        raise typer.BadParameter("give a FILE, or --rules")
    found = linting.lint(load(file), frozenset(ignore or ()))
    if as_json:
        print_json({"findings": [asdict(one) for one in found]})
    else:
        write(findings_text(found))
    fatal = ("error", "warning") if strict else ("error",)
    if any(one.severity in fatal for one in found):
        raise typer.Exit(1)


def export(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A profile.", show_default=False)
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A page, a trace, the document, or its schema.")
    ] = Format.json,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where it goes. Default: stdout."),
    ] = None,
) -> None:
    """Export a profile: one HTML page that needs no network, a trace for Perfetto, or JSON."""
    if form is Format.schema:
        from dflash_graph.profile.document import json_schema

        made = json.dumps(json_schema(), indent=1) + "\n"
    elif file is None:
        raise typer.BadParameter("give a FILE, or --format schema")
    else:
        made = _exported(load(file), form)
    if output is None:
        write(made)
        return
    try:
        output.write_text(made, encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{output}: expected a place to write, got {error.strerror}") from error
    write(f"written to {output}\n")


def parse_share(text: str) -> float:
    """A share: 3% or 0.03.

    Raises:
        OptionError: it is none, or negative.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise OptionError(f"fail-above: expected a share such as 3% or 0.03, got {text!r}")
    return share


def _exported(profile: Profile, form: Format) -> str:
    if form is Format.html:
        from dflash_graph.profile.html import render_html

        return render_html(profile)
    if form is Format.trace:
        from dflash_graph.profile.trace import trace_events

        return json.dumps(trace_events(profile)) + "\n"
    return profile.to_json()


def load(path: Path) -> Profile:
    """A profile from a file."""
    from dflash_graph.profile.document import Profile

    return Profile.load(path)


def _executor(profile: Profile, name: str | None) -> ExecutorProfile:
    if name is not None:
        return profile.executor(name)
    return profile.executors[0]


def _summary(profile: Profile) -> dict[str, Any]:
    """What tells one profile from another, on one line."""
    identity = profile.identity
    timed = [found for found in profile.executors if found.measured is not None]
    measured = timed[0].measured if timed else None
    return {
        "name": identity.name,
        "device": identity.device.name,
        "lowering": identity.options.get("lowering"),
        "draft_tokens": identity.options.get("draft_tokens"),
        "max_batch": identity.options.get("max_batch"),
        "choices": identity.choices,
        "round_us": None if measured is None else measured.median,
        "created": identity.created,
    }


def is_named(path: Path, schema: str) -> bool:
    """Whether a file says that it is of a schema, damaged or not."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return f'"{schema}"' in file.read(400)
    except OSError:
        return False
