"""What all commands print with: JSON, error lines, styled text, progress."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, TextIO

import typer

#: Exit code after Ctrl-C: 128 and the number of the signal.
INTERRUPTED: Final = 130

#: The option that every command which prints facts has.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

_CONTROL: Final = {
    code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)
}


class StdoutError(OSError):
    """stdout cannot be written; told apart from failures of other files, which are not its."""


class Stdout:
    """A stream whose failures are `StdoutError`; also where a process was started without one."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> Stdout:
        """click writes there itself where the encoding is ASCII."""
        return Stdout(self._stream.buffer)

    def write(self, text: Any) -> int:
        if self._stream is None:
            raise StdoutError(errno.EBADF, os.strerror(errno.EBADF))
        with _told_apart():
            return int(self._stream.write(text))

    def flush(self) -> None:
        if self._stream is not None:
            with _told_apart():
                self._stream.flush()

    def isatty(self) -> bool:
        return self._stream is not None and bool(self._stream.isatty())

    def give_up(self) -> None:
        """Lose what was not written, so that the flush at exit does not fail once more."""
        if self._stream is not None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StdoutError(error.errno, error.strerror) from error


def print_json(document: Any) -> None:
    """One document on stdout."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def is_styled(stream: TextIO) -> bool:
    """Whether a stream shows styles: a terminal that does, and no wish for none (NO_COLOR)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(text: str, *, dim: bool = False) -> None:
    """Text on stdout at once; a terminal gets no control characters, so that no text steers it."""
    if sys.stdout.isatty():
        text = text.translate(_CONTROL)
    if dim and text and is_styled(sys.stdout):
        text = f"\x1b[2m{text}\x1b[0m"
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress function for `Engine.load`, on stderr.

    Bars where that is a terminal, else one line where it takes long.
    """
    if sys.stderr.isatty():
        yield from _bars()
    else:
        said: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage == "compile" and stage not in said:
                said.add(stage)
                typer.echo(f"compiling {total} executors; cold, this takes a minute", err=True)

        yield line


def _bars() -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under headings: the first set left, the others right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        + "\n"
        for row in (head, *rows)
    )
