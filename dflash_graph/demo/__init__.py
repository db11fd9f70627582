"""The small trained models that ship with the package: a hybrid target and two drafts.

`DATA_CARD.md` in this folder says what they are, how they were made and how well they draft.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Final

from dflash_graph.errors import OptionError

#: The drafts that ship, by kind.
DRAFT_KINDS: Final = ("dflash", "dflash2")


def _root() -> Path:
    return Path(str(files(__name__)))


def target_directory() -> Path:
    """Return the folder of the demo target: config, weights and tokenizer."""
    return _root() / "target"


def draft_directory(kind: str) -> Path:
    """Return the folder of a demo draft: config and weights.

    Args:
        kind: ``"dflash"`` or ``"dflash2"``.

    Raises:
        OptionError: there is no draft of that kind.
    """
    if kind not in DRAFT_KINDS:
        known = ", ".join(repr(name) for name in DRAFT_KINDS)
        raise OptionError(f"demo draft: expected one of {known}, got {kind!r}")
    return _root() / kind


def prompts() -> list[str]:
    """Return the 20 demo prompts: excerpts of Python sources, 63 to 202 tokens each."""
    loaded: list[str] = json.loads((_root() / "prompts.json").read_text(encoding="utf-8"))
    return loaded
