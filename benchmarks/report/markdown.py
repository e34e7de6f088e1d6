"""A report as GitHub's Markdown, with its pictures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.report.blocks import BAD, Block, Cell, Details, Items, Picture, Section, Table, Text


def page(title: str, top: Sequence[Block], sections: Sequence[Section], foot: str) -> str:
    """The whole report. top: what stands above all sections. The pictures are in pictures/ beside it."""
    parts = [f"# {plain(title)}", *map(markdown, top)]
    for one in sections:
        parts += [f"## {plain(one.title)}", *([plain(one.caption)] if one.caption else []), *map(markdown, one.blocks)]
    return "\n\n".join([*parts, plain(foot)]) + "\n"


def markdown(block: Block) -> str:
    """A block."""
    match block:
        case Text(text, kind):
            return f"> **{plain(text)}**" if kind == "warning" else plain(text)
        case Items(lines):
            return "\n".join(f"- {plain(line)}" for line in lines)
        case Picture(name, text, _):
            return f"![{plain(text)}](pictures/{name}.svg)"
        case Details(title, inner):
            inside = "\n\n".join(map(markdown, inner))
            return f"<details><summary>{plain(title)}</summary>\n\n{inside}\n\n</details>"
        case Table(columns, numbers, rows, title):
            lines = [[plain(name) for name in columns], ["--:" if number else "---" for number in numbers]]
            lines += [[_cell(cell) for cell in row] for row in rows]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            return f"**{plain(title)}**\n\n{table}" if title else table


def filled(page: str, begin: str, end: str, text: str) -> str:
    """A page with `text` between its two comments."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def _cell(cell: Cell) -> str:
    text = plain(cell.text, "<br>")
    return f"**{text}**" if cell.style == BAD else text


def plain(text: str, line_break: str = " ") -> str:
    """Text as Markdown that shows it as it is, in one line."""
    escaped = re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\1\2\3", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"^([-+#])", r"\\\1", escaped)
    return line_break.join(escaped.splitlines())
