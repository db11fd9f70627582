"""`profile acceptance`: what counts of drafts say, and which K they speak for."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dflash_graph.cli.output import AsJson, print_json, write
from dflash_graph.cli.profile_read import is_named, load
from dflash_graph.errors import OptionError, ProfileError

if TYPE_CHECKING:
    from dflash_graph.profile.parts import AcceptanceCounts

ACCEPTANCE: Final = """\b
Examples:
  dflash-graph profile acceptance rounds.json
  dflash-graph profile acceptance rounds.json --cost 3=6.1 --cost 7=6.9"""


def acceptance(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A profile, or what generate --json printed.",
            show_default=False,
        ),
    ],
    cost: Annotated[
        list[str] | None,
        typer.Option(metavar="K=MS", help="A round's milliseconds at K; repeat for several K."),
    ] = None,
    cost_of: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Take K and its cost from a measured profile."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print how many drafts are accepted, how they survive by position, and the expected best K.

    The best K needs costs of several K. Its uncertainty is that of the counts.
    """
    from dflash_graph.profile import acceptance as counting
    from dflash_graph.profile.text import acceptance_text

    counts = read_counts(file)
    costs = dict(map(_cost_of, cost_of or ())) | dict(map(parse_cost, cost or ()))
    best = counting.best_k(counts, costs) if costs else None
    if as_json:
        print_json(
            {
                **counts.model_dump(mode="json"),
                "tokens_per_round": counting.tokens_per_round(counts),
                "histogram": counting.histogram(counts),
                "survival": [asdict(one) for one in counting.survival(counts)],
                "best_k": None if best is None else asdict(best),
            }
        )
    else:
        write(acceptance_text(counts, best))


def parse_cost(text: str) -> tuple[int, float]:
    """A cost: K=MS.

    Raises:
        OptionError: it is none, or speeds at it are not finite.
    """
    name, _, value = text.partition("=")
    try:
        k, ms = int(name), float(value)
    except ValueError:
        k, ms = 0, float("nan")
    if not isfinite(ms) or (ms and not isfinite(1e9 / ms)):
        raise OptionError(f"cost: expected K=MS such as 7=6.9, got {text!r}")
    return k, ms


def _cost_of(path: Path) -> tuple[int, float]:
    profile = load(path)
    executor = profile.executors[0]
    if executor.measured is None:
        raise ProfileError(f"{path}: expected a measured profile ({executor.name} has no times)")
    return int(profile.identity.options["draft_tokens"]), executor.measured.median / 1e3


def read_counts(path: Path) -> AcceptanceCounts:
    """Counts of a profile, or of the records of rounds in another document."""
    from dflash_graph.profile.acceptance import counts_in
    from dflash_graph.profile.document import SCHEMA

    if is_named(path, SCHEMA):
        found = load(path).acceptance
        if found is None:
            raise ProfileError(f"{path}: expected counts of rounds, got a profile without any")
        return found
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: expected a profile or records of rounds: {error}") from error
    try:
        return counts_in(document)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error
