"""document: the profile of a start-up as one JSON document with a published schema.

A profile says what was built, which implementation runs each node and why, what a node moves and
computes beside its floor, what memory is planned and taken, and what rounds did. `parts` holds what
it is made of; here it is put together, written and read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from dflash_graph.errors import ProfileError
from dflash_graph.options import MAX_DRAFT_TOKENS
from dflash_graph.profile.parts import (
    AcceptanceCounts,
    Ceiling,
    ExecutorProfile,
    Identity,
    MemoryClass,
    Part,
    Stage,
)

SCHEMA: Final = "dflash_graph.profile"
VERSION: Final = 1


class Profile(Part):
    """What a start-up produced, and how fast it is where that was measured.

    Example:
        >>> import dflash_graph as dg
        >>> options = dg.EngineOptions(device="cpu", lowering="eager", max_batch=1, max_context=64)
        >>> target, draft = dg.demo.target_directory(), dg.demo.draft_directory("dflash2")
        >>> with dg.Engine.load(target, draft, options) as engine:
        ...     profile = engine.profile()
        >>> dg.Profile.parse(profile.to_json()) == profile
        True
        >>> [segment.name for segment in profile.executor("round B=1").segments]
        ['forward', 'finish']
    """

    schema_name: Literal["dflash_graph.profile"] = SCHEMA
    schema_version: Literal[1] = VERSION
    identity: Identity
    ceiling: Ceiling
    executors: tuple[ExecutorProfile, ...] = Field(min_length=1)
    memory: tuple[MemoryClass, ...] = ()
    startup: tuple[Stage, ...] = ()
    acceptance: AcceptanceCounts | None = None

    def executor(self, name: str) -> ExecutorProfile:
        """The executor of a name.

        Raises:
            ProfileError: there is none; the message lists those that are there.
        """
        for found in self.executors:
            if found.name == name:
                return found
        known = ", ".join(repr(found.name) for found in self.executors)
        raise ProfileError(f"executor: expected one of {known}, got {name!r}")

    def to_json(self) -> str:
        """The document, keys in the order of the schema, an entry of a list of objects a line."""
        return "\n".join(_lines(self.model_dump(mode="json"))) + "\n"

    @classmethod
    def parse(cls, text: str, where: str = "profile") -> Profile:
        """Read a document.

        Args:
            text: JSON.
            where: what errors name.

        Raises:
            ProfileError: it is no JSON, of another schema or version, or damaged.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"{where}: expected a profile's JSON, got {error}") from error
        head = (
            (found.get("schema_name"), found.get("schema_version"))
            if isinstance(found, dict)
            else (None, None)
        )
        if head != (SCHEMA, VERSION):
            raise ProfileError(
                f"{where}: expected {SCHEMA} version {VERSION}, got "
                f"{head[0] or 'no schema_name'} version {head[1]}"
            )
        try:
            # From text: in JSON mode arrays are tuples.
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ProfileError(f"{where}: {place}: {first['msg']}") from error

    def save(self, path: str | Path) -> None:
        """Write the document; a reader never sees half of it.

        Raises:
            ProfileError: the file cannot be written.
        """
        from dflash_graph.profile_store import write_whole

        try:
            write_whole(Path(path), self.to_json())
        except OSError as error:
            raise ProfileError(
                f"{path}: expected a place to write a profile, got {error.strerror}"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file that `save` wrote.

        Raises:
            ProfileError: it is missing, unreadable, damaged or of another version.

        Example:
            >>> import dflash_graph as dg
            >>> try:
            ...     dg.Profile.load("nowhere.json")
            ... except dg.ProfileError:
            ...     print("no profile")
            no profile
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path}: expected a profile, got {error}") from error
        profile = cls.parse(text, str(path))
        _require_options(profile.identity.options, f"{path}: identity.options")
        return profile


def _require_options(options: Mapping[str, Any], where: str) -> None:
    """Options that commands read: lists and costs tell files apart by them."""
    lowering, k, batch = (options.get(name) for name in ("lowering", "draft_tokens", "max_batch"))
    if type(lowering) is not str:
        raise ProfileError(f"{where}: expected lowering, a text, got {lowering!r}")
    if type(k) is not int or not 0 <= k <= MAX_DRAFT_TOKENS:
        raise ProfileError(f"{where}: expected draft_tokens in 0..{MAX_DRAFT_TOKENS}, got {k!r}")
    if type(batch) is not int or batch < 1:
        raise ProfileError(f"{where}: expected max_batch, 1 or more, got {batch!r}")


def _lines(value: Any, indent: str = "", lead: str = "") -> Iterator[str]:
    """JSON that reads and compares well: nodes, buffers and the like take one line each."""
    if isinstance(value, dict) and any(_is_long(part) for part in value.values()):
        opening, closing = "{", "}"
        parts = [(f"{json.dumps(name)}: ", part) for name, part in value.items()]
    elif isinstance(value, list) and _is_long(value):
        opening, closing = "[", "]"
        parts = [("", part) for part in value]
    else:
        yield f"{indent}{lead}{json.dumps(value, allow_nan=False)}"
        return
    yield f"{indent}{lead}{opening}"
    for index, (name, part) in enumerate(parts):
        *body, last = _lines(part, indent + " ", name)
        yield from body
        yield last + ("," if index < len(parts) - 1 else "")
    yield f"{indent}{closing}"


def _is_long(value: Any) -> bool:
    """Whether a value holds objects of its own, so that it does not stand on one line."""
    if isinstance(value, dict):
        return any(isinstance(part, dict) or _is_long(part) for part in value.values())
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def json_schema() -> dict[str, Any]:
    """The document's JSON schema."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"{SCHEMA}.v{VERSION}",
        **Profile.model_json_schema(mode="serialization"),
    }
