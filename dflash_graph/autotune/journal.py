"""Journal: what has been measured, one JSON line each, so that nothing is measured twice.

A line is appended and synced before the next measurement begins; what a crash tears is the last
line, which is left out when the file is read. Writers of several processes take turns under a lock,
so their lines never mix. Lines of another device, version or template have other keys and stay as
they are.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from dflash_graph.errors import ProfileError
from dflash_graph.profile_store import locked

#: Part of every key; raised when equal records would no longer mean the same.
SCHEMA: Final = 1

Status = Literal["ok", "wrong", "failed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a measurement gave.

    Args:
        status: ``"wrong"``: other results than the oracle's or than its own; ``"failed"``: it does
            not compile, launch or fit.
        message: why, where it is not ok.
        samples: microseconds by call, as many for each call as turns.
    """

    status: Status
    message: str = ""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)


def first_line(error: Exception) -> str:
    """What an outcome says of an error: its class and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def record_key(*parts: object) -> str:
    """The key of what is identified by JSON values."""
    return sha256(json.dumps([SCHEMA, *parts], sort_keys=True).encode()).hexdigest()[:20]


class Journal:
    """Records by key, kept in a file.

    Args:
        path: the file; made with its folder at the first record.

    Raises:
        ProfileError: it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._found: dict[str, Outcome] = {}
        #: Every whole line, in order.
        self.lines: list[Mapping[str, Any]] = []
        torn = 0
        for line in self._read().split(b"\n"):
            if line.strip():
                try:
                    record = json.loads(line)
                    samples = {name: list(map(float, v)) for name, v in record["samples"].items()}
                    outcome = Outcome(record["status"], record["message"], samples)
                    self._found[record["key"]] = outcome
                    self.lines.append(record)
                except (ValueError, KeyError, TypeError, AttributeError):
                    torn += 1
        if torn:
            logger.warning("%s: %d lines are damaged and left out", self.path, torn)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ProfileError(
                f"{self.path}: expected a readable journal, got {error.strerror}"
            ) from error

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Outcome | None:
        """What was measured under a key."""
        return self._found.get(key)

    def add(self, key: str, outcome: Outcome, about: Mapping[str, Any]) -> Outcome:
        """Keep a measurement; returns it as it is kept, so that a rerun decides by the same.

        Args:
            about: what it is of, for people.

        Raises:
            ProfileError: it cannot be written, or another writer takes too long.
        """
        samples = {name: [round(v, 3) for v in s] for name, s in outcome.samples.items()}
        outcome = Outcome(outcome.status, outcome.message, samples)
        record = {"key": key, **about, **vars(outcome)}
        try:
            with locked(self.path), self.path.open("a+b") as file:
                # After a torn line a record begins on a line of its own.
                file.seek(0, os.SEEK_END)
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        file.write(b"\n")
                file.write(json.dumps(record).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ProfileError(
                f"{self.path}: expected to write a journal, got {error.strerror}"
            ) from error
        self._found[key] = outcome
        self.lines.append(record)
        return outcome
