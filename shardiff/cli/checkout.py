"""The lesson that a checkout has beside the package, and what a wheel says of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from shardiff.cli.answers import refuse

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "check": "Train with every strategy and implementation; show how far each is from the single-device reference.",
    "bench": "Measure both frameworks in one run, with the machine and the method beside every figure.",
    "report": "Measure everything and write it as one HTML file, with Markdown and JSON beside it.",
    "plan": "Predict the step time and memory of every mesh on given devices and links.",
}


def register(app: typer.Typer) -> None:
    """Add check, bench, report, plan and the diff of strategies, or what says which checkout has them."""
    if here():
        lesson("benchmarks.commands").register(app)
        return
    settings = {"ignore_unknown_options": True}
    for name, text in NEEDED.items():
        app.command(name, help=f"{text} (Needs a checkout.)", context_settings=settings)(missing)


def here() -> bool:
    """Whether the package lies in a checkout."""
    return all((ROOT / name).is_file() for name in ("pyproject.toml", "benchmarks/commands.py", "contract/__init__.py"))


def lesson(name: str) -> Any:
    """A module of the lesson. Found in the checkout, whatever the current directory or the path has of that name.

    For this, the checkout comes first on sys.path. A process that loads a user's code must not call this.
    """
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(name)


def missing(context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """The command that stands for one of the lesson's."""
    refuse(where(str(context.command.name)))


def where(what: str) -> str:
    """Where to find something that only a checkout has, in one line."""
    return (
        f"{what} needs the strategies of the lesson, which are not part of the installed package: "
        "clone the repository of shardiff and run make install there; .venv/bin/shardiff then has it"
    )
