"""What commands share: options, refusals, and the exit status of a wrong input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import typer


def complain(message: str) -> int:
    with suppress(OSError):
        print("shardiff:", " ".join(message.split()), file=sys.stderr)
    return 2


def refuse(message: str) -> NoReturn:
    """End with status 2 and one line."""
    raise typer.Exit(complain(message))


TIMEOUT = typer.Option(metavar="SECONDS", help="Ranks that are idle and silent for longer count as stuck.")


def check_timeout(timeout: float) -> None:
    """ValueError unless it can be waited for."""
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """ValueError unless the value of this option is known."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def repeatable(metavar: str, text: str) -> Any:
    """An option that may be given more than once."""
    return typer.Option(metavar=metavar, help=f"{text} Repeatable.")
