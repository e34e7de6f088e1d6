"""What is said of text that cannot be read."""

from __future__ import annotations


class HloError(ValueError):
    """The text cannot be read. The message is one line that says where, what is wrong, and what would be right."""


def display(text: str) -> str:
    """A piece of latin-1 program text as the file's author wrote it."""
    return text.encode("latin-1", "replace").decode("utf-8", "replace")


def shown(text: str, most: int = 60) -> str:
    """A piece of program text for an error, cut off where it is long."""
    return display(text) if len(text) <= most else f"{display(text[:most])}..."


def error(text: str, position: int, problem: str) -> HloError:
    """An HloError that names the line."""
    return HloError(f"line {text.count(chr(10), 0, position) + 1}: {problem}")


def cut_off(where: str) -> HloError:
    """An HloError for text that ends too early."""
    return HloError(f"cut off inside {where}: HLO text ends with the closing brace of its last computation")
