"""Presets: named pairs of model configs, for printing graphs and plans without a checkpoint.

A preset is one JSON file in `presets/` with `name`, `description`, and the Hugging Face config
fields of `target` and `draft`.
"""

from __future__ import annotations

if __name__ == "profiles":
    raise ImportError("import dflash_graph.profiles")

import json
from importlib.resources import files
from typing import Any

from dflash_graph.errors import OptionError


def preset_names() -> list[str]:
    """Return the names of the presets that ship, sorted."""
    folder = files(__name__) / "presets"
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def load_preset(name: str) -> dict[str, Any]:
    """Return one preset.

    Args:
        name: one of `preset_names`.

    Returns:
        A mapping with `name`, `description`, `target` and `draft`; the last two hold the fields of
        a `config.json`.

    Raises:
        OptionError: no preset has that name.
    """
    names = preset_names()
    if name not in names:
        raise OptionError(f"preset: expected one of {', '.join(names)}, got {name!r}")
    text = (files(__name__) / "presets" / f"{name}.json").read_text(encoding="utf-8")
    preset: dict[str, Any] = json.loads(text)
    return preset
