"""Numbers in the form that people read."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes in decimal units with three digits, such as 1.05 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    raise AssertionError("the loop returns")
