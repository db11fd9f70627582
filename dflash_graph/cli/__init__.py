"""The command line: thin functions over the API, one module a command.

Commands load torch only when they run, so that help is there at once.
"""

from __future__ import annotations

import errno
import logging
import sys
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup

from dflash_graph.cli import autotune, bench, demo, doctor, generate, graph, plan, profile
from dflash_graph.cli.output import INTERRUPTED, Stdout, StdoutError, print_error
from dflash_graph.errors import DFlashGraphError

PROGRAM = "dflash-graph"


class _Commands(TyperGroup):
    """Turns what a command raises on purpose into one line and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # as registered, not by name

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DFlashGraphError as error:
            print_error(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    name=PROGRAM,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: examples can be copied from it, and it stays readable in narrow terminals.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"\b\nExamples:\n  {PROGRAM} demo\n  {PROGRAM} generate --help",
)
for _module in (demo, generate, bench, graph, plan, doctor):
    app.command(_module.NAME, short_help=_module.SHORT, epilog=_module.EPILOG)(_module.command)
app.add_typer(profile.app)
app.add_typer(autotune.app)


class _StderrHandler(logging.Handler):
    """Log lines on whatever stderr is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {self.format(record)}", file=sys.stderr)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from dflash_graph import __version__

        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            show_default=False,
            help="Log more on stderr.",
        ),
    ] = 0,
) -> None:
    """Compile and run rounds of speculative decoding.

    DFlash and DFlash2 drafts for Qwen3.5 hybrid targets.
    """
    logger = logging.getLogger("dflash_graph")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    logger.setLevel((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])


def main() -> int:
    """Run the program on `sys.argv`; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        # Generated text may hold characters that a terminal's encoding lacks.
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    before, stdout = sys.stdout, Stdout(sys.stdout)
    sys.stdout = cast(TextIO, stdout)
    try:
        code = _exit_code()
        # What is buffered may fail only here.
        sys.stdout.flush()
    except StdoutError as error:
        if error.errno != errno.EPIPE:
            print_error(f"stdout: expected a place to write, got {error.strerror}")
        stdout.give_up()
        return 1
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        return 1
    finally:
        sys.stdout = before
    return code


def _exit_code() -> int:
    try:
        app(prog_name=PROGRAM)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
