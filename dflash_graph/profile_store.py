"""profile_store: where measured choices are looked up, what they must match, and how they are kept.

A lookup takes an explicit file before the user's folder before what ships; where none has an entry
for a node, its template's default stands. An entry is used only where everything that the result
rests on is as it was when it was measured: device name and capability, template, dtype and sizes.
Other versions are warned of, once. Nothing here starts a measurement.

Files are replaced whole, so a reader needs no lock and a folder may be read-only; writers take
turns under a lock and merge with what they find. A damaged file is a miss with a warning, and is
put aside by the next save.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

from dflash_graph.choices import (
    SCHEMA,
    Choices,
    Entry,
    entry_document,
    layered,
    parse_choices,
    shipped_choices,
)
from dflash_graph.errors import OptionError, ProfileError
from dflash_graph.rendering import TemplateInfo, template_info, template_names

#: Names the user's folder of profiles when set.
VARIABLE: Final = "DFLASH_GRAPH_PROFILES"
#: What an entry's versions are of, in the order in which differences are told.
VERSIONS: Final = ("driver", "cuda", "torch", "triton", "package")

_LOCK_SECONDS: Final = 60.0
_LINE: Final = 100

logger = logging.getLogger(__name__)
_said: set[str] = set()


@dataclass(frozen=True)
class Identity:
    """A device and the versions that run on it.

    Args:
        device: its name, as the driver gives it.
        capability: its compute capability, 90 for 9.0.
        versions: version by name, see `VERSIONS`; without those that are not there.
    """

    device: str
    capability: int
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """A field in which an entry is not what runs here.

    Args:
        field: its name.
        stored: the entry's value.
        here: the value here.
        excludes: the entry is not used because of it.
    """

    field: str
    stored: object
    here: object
    excludes: bool

    def __str__(self) -> str:
        return f"{self.field}: measured with {self.stored}, here {self.here}"


@dataclass(frozen=True)
class Layer:
    """One place of a lookup.

    Args:
        name: ``"explicit"``, ``"user"`` or ``"shipped"``.
        source: the file.
        choices: what it holds; None where it is missing or damaged.
        problem: why it is not read, where it is there.
    """

    name: Literal["explicit", "user", "shipped"]
    source: str
    choices: Choices | None
    problem: str = ""


def running_versions() -> dict[str, str]:
    """Versions of what runs here; the driver's only where a device is."""
    import torch

    found = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if torch.cuda.is_available():
        found["driver"] = _driver_version()
    for name, distribution in (("triton", "triton"), ("package", "dflash-graph")):
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return {name: found[name] for name in VERSIONS if found.get(name)}


def device_identity(index: int | None = None) -> Identity:
    """A CUDA device, by default the current one, and what runs on it.

    Raises:
        OptionError: torch sees none.
    """
    import torch

    if not torch.cuda.is_available():
        raise OptionError("device: expected a CUDA device, got none (torch sees no CUDA device)")
    major, minor = torch.cuda.get_device_capability(index)
    return Identity(torch.cuda.get_device_name(index), 10 * major + minor, running_versions())


@cache
def _templates() -> dict[str, TemplateInfo]:
    """The template of each op."""
    return {op: info for info in map(template_info, template_names()) for op in info.ops}


def template_hash(op: str) -> str | None:
    """Hash of an op's template and all it includes; None where it has no template."""
    info = _templates().get(op)
    if info is None:
        return None
    return sha256(json.dumps(sorted(info.texts.items())).encode()).hexdigest()[:16]


def differences(entry: Entry, identity: Identity) -> tuple[Difference, ...]:
    """In what an entry of the device's profile is not what runs here.

    Dtype and sizes are no part of it: a call finds only what has its own.
    """
    found = []
    here = template_hash(entry.op)
    if here is None:
        found.append(Difference("op", entry.op, "no such template", True))
    elif entry.template is not None and entry.template != here:
        found.append(Difference("template", entry.template, here, True))
    else:
        found += _wrong_tiles(entry)
    found += [
        Difference(name, entry.versions[name], identity.versions[name], False)
        for name in VERSIONS
        if name in entry.versions
        and name in identity.versions
        and entry.versions[name] != identity.versions[name]
    ]
    return tuple(found)


def _wrong_tiles(entry: Entry) -> list[Difference]:
    """Tiles that the template does not take; for entries that do not name a template."""
    info, found = _templates()[entry.op], []
    for name, value in entry.tiles.items():
        hole = info.holes.get(name)
        if hole is None:
            found.append(Difference(f"tile {name}", value, "no such hole", True))
        elif not hole.accepts(value):
            found.append(Difference(f"tile {name}", value, hole.legal, True))
    return found


def user_folder() -> Path:
    """The user's profiles: `DFLASH_GRAPH_PROFILES`, else the user's configuration folder.

    Nothing is made here.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return platformdirs.user_config_path("dflash_graph") / "profiles"


def file_name(device: str, capability: int) -> str:
    """The name of a device's file in the user's folder: ``"nvidia-h200-sm90.json"``."""
    word = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return f"{word}-sm{capability}.json"


def user_file(device: str, capability: int) -> Path:
    """The user's profile of a device."""
    return user_folder() / file_name(device, capability)


def read_profile(path: str | Path) -> Choices:
    """Read a file that must be there.

    Raises:
        ProfileError: it is missing, unreadable or damaged.
    """
    return parse_choices(_text(Path(path)), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(f"{path}: expected a profile of choices, got no file") from None
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{path}: expected a profile of choices, got bytes that are no UTF-8 ({error.reason})"
        ) from error
    except OSError as error:
        raise ProfileError(
            f"{path}: expected a readable profile of choices, got {error.strerror}"
        ) from error


def find_layers(
    device: str, capability: int, explicit: str | Path | None = None
) -> tuple[Layer, ...]:
    """The places of a lookup for a device, first to last.

    Raises:
        ProfileError: an explicit file is missing or cannot be read. A damaged one is a miss.
    """
    found = []
    if explicit is not None:
        if not os.path.isfile(explicit):  # one that is asked for must be there
            _text(Path(explicit))
        found.append(_layer("explicit", Path(explicit)))
    found.append(_layer("user", user_file(device, capability)))
    found += [
        Layer("shipped", choices.source, choices)
        for choices in shipped_choices()
        if (choices.device, choices.capability) == (device, capability)
    ]
    return tuple(found)


def all_layers() -> tuple[Layer, ...]:
    """Every profile there is, of any device: the user's, then what ships."""
    try:
        paths = sorted(user_folder().glob("*.json"))
    except OSError:
        paths = []
    shipped = (Layer("shipped", choices.source, choices) for choices in shipped_choices())
    return (*(_layer("user", path) for path in paths), *shipped)


def _layer(name: Literal["explicit", "user"], path: Path) -> Layer:
    try:
        if not path.exists():
            return Layer(name, str(path), None)
        return Layer(name, str(path), read_profile(path))
    except (ProfileError, OSError) as error:
        return Layer(name, str(path), None, str(error))


def lookup(identity: Identity, explicit: str | Path | None = None) -> Choices:
    """What kernels on a device are chosen by.

    What differs is logged, once a process: damaged files, entries that are not used, versions.

    Args:
        identity: the device and what runs on it.
        explicit: a file that goes before all others.

    Raises:
        ProfileError: the explicit file is missing or cannot be read.
    """
    kept = []
    for layer in find_layers(identity.device, identity.capability, explicit):
        if layer.choices is None:
            if layer.problem:
                _warn(f"{layer.problem}; it is not used")
            continue
        wrong = device_difference(layer.choices, identity)
        if wrong is not None:
            _warn(f"{layer.source}: {wrong}; other profiles and defaults are used instead")
            continue
        kept.append(_usable(layer.choices, identity))
    return layered(identity.device, identity.capability, kept)


def device_difference(choices: Choices, identity: Identity) -> Difference | None:
    """The field in which a profile is another device's, or None."""
    if choices.device != identity.device:
        return Difference("device name", choices.device, identity.device, True)
    if choices.capability != identity.capability:
        return Difference("device capability", choices.capability, identity.capability, True)
    return None


def _usable(choices: Choices, identity: Identity) -> Choices:
    entries = []
    for entry in choices.entries:
        found = differences(entry, identity)
        excluding = [str(difference) for difference in found if difference.excludes]
        if excluding:
            _warn(
                f"{choices.source}: {entry.key}: {'; '.join(excluding)}; other profiles and "
                f"defaults are used instead"
            )
            continue
        for difference in found:
            _warn(f"{choices.source}: {difference}; its choices are used all the same")
        entries.append(entry)
    return Choices(choices.device, choices.capability, tuple(entries), choices.pdl, choices.source)


def _warn(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning("%s", message)


def save(
    path: str | Path, identity: Identity, entries: Iterable[Entry], *, pdl: bool = False
) -> None:
    """Merge entries into a file, which is made if it is not there.

    Args:
        path: the file.
        identity: the device that they are for.
        entries: they replace those of the same key.
        pdl: what a new file says of all kernels; one that is there keeps its word.

    Raises:
        ProfileError: the file is another device's, or cannot be written.
    """
    new = [entry_document(entry) for entry in entries]

    def merge(document: dict[str, Any] | None) -> dict[str, Any]:
        if document is None:
            device = {"name": identity.device, "capability": identity.capability}
            document = {"schema": SCHEMA, "device": device, "pdl": pdl, "choices": []}
        stored = Choices(document["device"]["name"], document["device"]["capability"])
        wrong = device_difference(stored, identity)
        if wrong is not None:
            raise ProfileError(
                f"{path}: expected a profile of {wrong.field} {wrong.here}, got {wrong.stored}"
            )
        return merged(document, new)

    update(path, merge)


def merged(document: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A profile's document with entries added; they replace those of the same key.

    What stands above the entries of a document holds for those that do not say it themselves.
    """
    own = [_own(entry, document) for entry in document["choices"]]
    by_key = {_key(entry): dict(entry) for entry in (*own, *new)}
    # Of two entries that fit a call the first is taken: those that say more go first.
    order = sorted(by_key, key=lambda key: (key[0], -len(by_key[key]["sizes"]), key))
    return {**document, "choices": [by_key[key] for key in order]}


def _own(entry: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    versions = entry.get("versions", document.get("versions"))
    return {**entry, "versions": versions} if versions else dict(entry)


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    return entry["op"], entry["dtype"], json.dumps(entry["sizes"], sort_keys=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is in a block that is `locked` for this file; its folder is made.

    Raises:
        ProfileError: another process takes too long.
        OSError: the folder or the lock cannot be written.
    """
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=_LOCK_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise ProfileError(
            f"{path}: expected its lock within {_LOCK_SECONDS:.0f} s, got none; another process "
            f"holds {error.lock_file}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def update(
    path: str | Path, change: Callable[[dict[str, Any] | None], Mapping[str, Any] | None]
) -> None:
    """Replace a file by what `change` makes of it; other writers wait.

    Args:
        path: the file; its folder is made.
        change: from the document, None where there is none or it is damaged, to the new one; None
            leaves the file alone.

    Raises:
        ProfileError: the file cannot be written, is no regular file, or another writer takes too
            long.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ProfileError(f"{path}: expected a file of choices, got no regular file")
    try:
        with locked(path):
            # Only the holder of the lock writes, so these are of writers that were killed.
            for left in path.parent.glob(f".{path.name}.*.new"):
                left.unlink(missing_ok=True)
            _replace(path, change)
    except OSError as error:
        raise ProfileError(
            f"{path}: expected to write a profile, got {error.strerror or error}; name another "
            f"folder with {VARIABLE}"
        ) from error


def _replace(
    path: Path, change: Callable[[dict[str, Any] | None], Mapping[str, Any] | None]
) -> None:
    document: dict[str, Any] | None = None
    damaged = False
    if path.exists():
        try:
            text = _text(path)
            parse_choices(text, str(path))
            document = json.loads(text)
        except ProfileError as error:
            damaged = True
            _warn(f"{error}; it is not used")
    made = change(document)
    if made is None:
        return
    text = document_text(made)
    parse_choices(text, str(path))
    if damaged:
        shutil.copyfile(path, path.with_name(f"{path.name}.damaged"))
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Make a file hold a text; readers and a crash see the old one or the new one.

    What a link leads to is written, and a pipe or a device is written to.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def require_place(path: Path) -> None:
    """Refuse, before the work of making a document is done, where it could not be written.

    Raises:
        ProfileError: its folder is not there or takes no files, or it is a folder itself.
    """
    folder = path.resolve().parent
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    if path.is_dir() or not (is_special or (folder.is_dir() and os.access(folder, os.W_OK))):
        raise ProfileError(
            f"{path}: expected a place to write a profile, got "
            f"{'a folder' if path.is_dir() else f'a folder {folder} that takes no files'}"
        )


def document_text(document: Mapping[str, Any]) -> str:
    """A profile's JSON with one line for what fits one, so that a review shows entries."""
    return _lines(document, "") + "\n"


def _lines(value: Any, margin: str) -> str:
    whole = json.dumps(value, ensure_ascii=False, allow_nan=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(v, dict | list) for v in inner) and len(whole) + len(margin) < _LINE:
        return whole
    deeper = margin + " "
    if isinstance(value, dict) and value:
        body = [f"{json.dumps(str(name))}: {_lines(v, deeper)}" for name, v in value.items()]
        return "{\n" + ",\n".join(deeper + line for line in body) + f"\n{margin}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(deeper + _lines(v, deeper) for v in value) + f"\n{margin}]"
    return whole


def _driver_version() -> str:
    """The driver's version, as its kernel module says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else ""
