"""Kernel templates become Python files: the Jinja environment, specialisation keys, the cache.

A template opens with a Jinja comment that says which ops it implements and lists its holes, one
line each::

    op: linear
    hole: O       int >= 1               output features
    hole: dtype   bfloat16 | float32     of x and weight
    hole: offset  bool                   weights are stored around zero

The list is checked: against what the template uses, and against the values it is rendered with.
Values are integers, booleans and names of a stated enumeration, never free text. The result is
named by its content, so a file in the cache is either what it should be or is written anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

import jinja2
from jinja2 import meta

from dflash_graph.errors import TemplateError

#: Part of every key; raised when equal templates and holes are to give other files.
SCHEMA: Final = 1
#: Names the cache folder when no argument does.
CACHE_VARIABLE: Final = "DFLASH_GRAPH_CACHE"

SUFFIX: Final = ".py.jinja"
HoleValue = int | bool | str

_HEADER = re.compile(r"\A\{#(.*?)#\}", re.DOTALL)
_OP = re.compile(r"^op: (\w+(?:, \w+)*)$", re.MULTILINE)
_HOLE = re.compile(r"^hole: +(\w+) +(.+)$", re.MULTILINE)
_RANGE = re.compile(r"int >= (\d+)")
_CHOICE = re.compile(r"\w+(?: \| \w+)*")
_loading = threading.Lock()


@dataclass(frozen=True)
class Hole:
    """One hole of a template.

    Args:
        name: as the template uses it.
        legal: the legal values as the header states them.
        least: the smallest integer, for a hole that takes any from there on.
        choices: the legal values, for a hole that takes a few; empty otherwise.
    """

    name: str
    legal: str
    least: int = 0
    choices: tuple[HoleValue, ...] = ()

    def accepts(self, value: object) -> bool:
        """Whether `value` is legal; `True` is no integer here, and 1 no boolean."""
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        return type(value) is int and value >= self.least


@dataclass(frozen=True)
class TemplateInfo:
    """What a template's header states."""

    name: str
    ops: tuple[str, ...]
    holes: Mapping[str, Hole]
    texts: Mapping[str, str]
    """The template and every file that it includes or imports, by file name."""


@dataclass(frozen=True)
class Rendered:
    """A rendered template: its source, its key, and the file that holds the source."""

    source: str
    key: str
    path: Path


def template_names() -> tuple[str, ...]:
    """The templates that ship, sorted; a name is the file's without its suffix."""
    names = _environment().list_templates()
    return tuple(
        sorted(
            name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX) and "/" not in name
        )
    )


def template_info(template: str) -> TemplateInfo:
    """What the header of a template states.

    Raises:
        TemplateError: there is no such template, or its header is not what its text uses.
    """
    if template not in template_names():
        raise TemplateError(
            f"template: expected one of {', '.join(template_names())}, got {template!r}"
        )
    return _read(_environment(), template)


def render(
    template: str, holes: Mapping[str, HoleValue], *, cache_dir: str | Path | None = None
) -> Rendered:
    """Render a template into the cache folder.

    A file that is there and holds the right text is left alone; any other is replaced at once.

    Args:
        template: one of `template_names`.
        holes: a value for every hole that the template declares.
        cache_dir: see `cache_folder`.

    Raises:
        TemplateError: there is no such template, a hole is missing, unknown or has an illegal
            value, or the file cannot be written.
    """
    info = template_info(template)
    _check_holes(info, holes)
    ordered = {name: holes[name] for name in sorted(holes)}
    identity = json.dumps([SCHEMA, dict(sorted(info.texts.items())), ordered])
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    stated = ", ".join(f"{name}={value}" for name, value in ordered.items())
    body = _environment().get_template(template + SUFFIX).render(ordered).lstrip("\n")
    source = f"# Rendered from {template}{SUFFIX}\n# holes: {stated}\n# key: {key}\n{body}"
    path = cache_folder(cache_dir) / f"{template}_{key}.py"
    _write(path, source)
    return Rendered(source, key, path)


def load(rendered: Rendered) -> ModuleType:
    """Import a rendered file under a name of its own; the same key gives the same module.

    Triton reads a kernel's source back from the file, so the file must stay until then.
    """
    name = f"_dflash_graph_{rendered.path.stem}"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, rendered.path)
        assert spec is not None, f"{rendered.path} is no Python file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            # Not through the loader: its bytecode cache goes by size and time, not by content.
            exec(compile(rendered.source, rendered.path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def cache_folder(explicit: str | Path | None = None) -> Path:
    """Where rendered files live: the argument, else `DFLASH_GRAPH_CACHE`, else the user's cache.

    Nothing is made here.

    Raises:
        TemplateError: the name belongs to something that is not a folder.
    """
    where, named = "cache_dir", explicit
    if named is None:
        where, named = CACHE_VARIABLE, os.environ.get(CACHE_VARIABLE) or None
    if named is None:
        import platformdirs

        where, named = "user cache", platformdirs.user_cache_path("dflash_graph") / "kernels"
    folder = Path(named).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise TemplateError(f"{where}: expected a folder, got the file {folder}")
    return folder


@cache
def _environment() -> jinja2.Environment:
    return _environment_of(jinja2.PackageLoader("dflash_graph.templates", ""))


def _environment_of(loader: jinja2.BaseLoader) -> jinja2.Environment:
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


@cache
def _read(environment: jinja2.Environment, template: str) -> TemplateInfo:
    """Parse and check a template's header: once a process, a start-up renders it many times."""
    texts: dict[str, str] = {}
    used: set[str] = set()
    waiting = [template + SUFFIX]
    while waiting:
        name = waiting.pop()
        assert environment.loader is not None
        texts[name] = environment.loader.get_source(environment, name)[0]
        tree = environment.parse(texts[name])
        used |= meta.find_undeclared_variables(tree)
        for other in meta.find_referenced_templates(tree):
            if other is None:
                raise TemplateError(f"{name}: expected included files named by a literal")
            if other not in texts:
                waiting.append(other)
    where = template + SUFFIX
    header = _HEADER.search(texts[where])
    op = _OP.search(header[1]) if header else None
    if header is None or op is None:
        raise TemplateError(f"{where}: expected a header comment with a line 'op: NAME'")
    holes = {name: _hole(where, name, rest) for name, rest in _HOLE.findall(header[1])}
    if holes.keys() != used:
        raise TemplateError(
            f"{where}: expected the header to list the holes in use; not listed "
            f"{sorted(used - holes.keys())}, not used {sorted(holes.keys() - used)}"
        )
    return TemplateInfo(template, tuple(op[1].split(", ")), holes, texts)


def _hole(where: str, name: str, rest: str) -> Hole:
    """A hole from its line: legal values, then after two blanks what it is."""
    legal = re.split(r" {2,}", rest)[0]
    if legal == "bool":
        return Hole(name, legal, choices=(False, True))
    if found := _RANGE.fullmatch(legal):
        return Hole(name, legal, least=int(found[1]))
    if _CHOICE.fullmatch(legal):
        words = legal.split(" | ")
        return Hole(name, legal, choices=tuple(int(w) if w.isdecimal() else w for w in words))
    raise TemplateError(
        f"{where}: hole {name}: expected 'bool', 'int >= N' or 'A | B', got {legal!r}"
    )


def _check_holes(info: TemplateInfo, holes: Mapping[str, HoleValue]) -> None:
    if holes.keys() != info.holes.keys():
        raise TemplateError(
            f"{info.name}: expected holes {sorted(info.holes)}; "
            f"missing {sorted(info.holes.keys() - holes.keys())}, "
            f"unknown {sorted(holes.keys() - info.holes.keys())}"
        )
    for name, value in holes.items():
        if not info.holes[name].accepts(value):
            raise TemplateError(
                f"{info.name}.{name}: expected {info.holes[name].legal}, got {value!r}"
            )


def _write(path: Path, source: str) -> None:
    """Make `path` hold `source`; readers see the old file or the new one, never a part."""
    data = source.encode()
    try:
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}_", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise TemplateError(
            f"{path}: expected to write a rendered kernel, got {error}; "
            f"name another folder with {CACHE_VARIABLE}"
        ) from error
