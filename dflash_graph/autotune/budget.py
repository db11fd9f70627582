"""budget: for how long a run begins measurements."""

from __future__ import annotations

import re
from typing import Final

_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS: Final = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """A time such as 600s, 10m, 1h or 600.

    Raises:
        ValueError: it is no such time, or none at all.
    """
    found = _TIME.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"expected a time such as 600s, 10m or 1h, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]
