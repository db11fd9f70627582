"""`profile`: what a start-up builds, as a document to show, compare, check and export."""

from __future__ import annotations

from typing import Final

import typer

from dflash_graph.cli import profile_acceptance, profile_build, profile_read, profile_what_if

NAME: Final = "profile"
SHORT: Final = "Build, show, compare and check profiles of a start-up."
_OWN: Final = """\b
Examples:
  dflash-graph profile build --help
  dflash-graph profile show --help"""

#: Name, function, examples, and its line in the list of commands.
_COMMANDS: Final = (
    ("build", profile_build.build, profile_build.BUILD, "Build one, from configs or rounds."),
    (
        "what-if",
        profile_what_if.what_if,
        profile_what_if.WHAT_IF,
        "Memory and floor of other K, trees, B and contexts.",
    ),
    ("list", profile_read.list_profiles, profile_read.LIST, "The profiles of a folder."),
    ("show", profile_read.show, profile_read.SHOW, "Where time and bytes of a round go."),
    ("diff", profile_read.diff, profile_read.DIFF, "What differs between two."),
    ("lint", profile_read.lint, profile_read.LINT, "Look for what should not be in one."),
    (
        "acceptance",
        profile_acceptance.acceptance,
        profile_acceptance.ACCEPTANCE,
        "How many drafts are accepted, and the best K.",
    ),
    ("export", profile_read.export, profile_read.EXPORT, "As a page, a trace or JSON."),
)

#: The examples of all its commands.
EPILOG: Final = "\n".join((_OWN, *(examples for _, _, examples, _ in _COMMANDS)))

app = typer.Typer(
    name=NAME,
    no_args_is_help=True,
    rich_markup_mode=None,
    short_help=SHORT,
    epilog=_OWN,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command, _examples, _short in _COMMANDS:
    app.command(_name, short_help=_short, epilog=_examples)(_command)


@app.callback()
def _profile() -> None:
    """Say what a start-up builds, which kernel runs where and why, and how far it is from its
    floor.

    A profile is a JSON file. Building one without --measure needs no weights and no GPU.
    """
