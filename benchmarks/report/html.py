"""A report as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.report.blocks import Block, Section

if TYPE_CHECKING:
    from jinja2 import Environment


def page(title: str, top: Sequence[Block], sections: Sequence[Section], foot: str) -> str:
    """The whole report. top: what stands above all sections."""
    return _templates().get_template("page.html.j2").render(title=title, top=top, sections=sections, foot=foot)


@cache
def _templates() -> Environment:
    """The templates, which escape whatever they are given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined
    )
    made.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return made
