"""Numbers in words: payloads in binary units, times in three digits."""

from __future__ import annotations


def binary_size(count: float) -> str:
    """Bytes in binary units, as payloads are given: 16 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError("the loop returns")


def duration(seconds: float) -> str:
    """Three digits: 12.3 us."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def counted(count: int, one: str, many: str = "") -> str:
    """1 rank, 2 ranks."""
    return f"{count} {one if count == 1 else many or one + 's'}"
