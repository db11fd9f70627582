"""quantities: times and rates as short text for people; sizes are `report.size_text`."""

from __future__ import annotations

from typing import Final

_RATES: Final = ("flop/s", "kflop/s", "Mflop/s", "Gflop/s", "Tflop/s", "Pflop/s")


def time_text(us: float) -> str:
    """Microseconds: `"42 ns"`, `"12.3 µs"`, `"13.17 ms"`, `"2.1 s"`."""
    if us == 0:
        return "0"
    if abs(us) < 0.0995:
        return f"{_digits(us * 1e3)} ns"
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(us) >= size * 0.9995:
            return f"{_digits(us / size)} {unit}"
    return f"{_digits(us)} µs"


def rate_text(flop_per_s: float) -> str:
    """Operations a second: `"989 Tflop/s"`."""
    rate = flop_per_s
    for unit in _RATES[:-1]:
        if abs(rate) < 999.95:
            return f"{_digits(rate)} {unit}"
        rate /= 1000
    return f"{_digits(rate)} {_RATES[-1]}"


def ratio_text(ratio: float) -> str:
    """How many times as much; from a hundred on without decimals."""
    return (f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}") + "\u00d7"


def _digits(number: float) -> str:
    """Two decimals below 100, one below 1000, none above; without zeros at the end."""
    size = abs(number)
    places = 2 if size < 100 else 1 if size < 1000 else 0
    if 0 < size < 0.005:
        return f"{number:.1g}"
    text = f"{number:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
