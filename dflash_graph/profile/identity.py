"""identity: what a profile is of: device, versions, geometry."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from dflash_graph.choices import Choices
from dflash_graph.models.pair import ModelPair
from dflash_graph.profile.parts import DeviceIdentity, Identity
from dflash_graph.profile_store import running_versions

_PACKAGES: Final = ("dflash-graph", "torch", "triton")


def identity_of(
    pair: ModelPair,
    *,
    name: str,
    device: DeviceIdentity,
    options: Mapping[str, Any],
    choices: Choices | None,
) -> Identity:
    """The head of a profile that is made now."""
    geometry = {
        "target": _plain(asdict(pair.target)),
        "draft": None if pair.draft is None else _plain(asdict(pair.draft)),
        "dtype": pair.dtype,
        "emitted_vocab": pair.emitted_vocab,
        "draft_causality": pair.draft_causality,
    }
    text = json.dumps(geometry, sort_keys=True)
    return Identity(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        device=device,
        versions=_versions(),
        geometry=geometry,
        geometry_hash=sha256(text.encode()).hexdigest()[:16],
        options=_plain(dict(options)),
        choices=choices.source if choices is not None else "default",
    )


def this_device(kind: str) -> DeviceIdentity:
    """The device of this process, `"cpu"` or `"cuda"`."""
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return DeviceIdentity(
            kind=kind,
            name=properties.name,
            capability=10 * properties.major + properties.minor,
            memory_bytes=properties.total_memory,
            driver=running_versions().get("driver") or None,
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceIdentity(kind=kind, name=platform.machine(), memory_bytes=memory)


def device_of(choices: Choices | None, kind: str) -> DeviceIdentity:
    """The device that choices are for, else one that is only named by its kind."""
    if choices is None:
        return DeviceIdentity(kind=kind, name="any")
    return DeviceIdentity(kind="cuda", name=choices.device, capability=choices.capability)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """The same as JSON values: tuples become lists, paths their text."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return plain
