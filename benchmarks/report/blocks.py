"""What a report is made of: blocks, which know neither HTML nor Markdown, and what turns them into either.

All text is plain; each writer escapes it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.table

GOOD, FAIR, BAD = "green", "yellow", "red"  # styles of cells, by the names that the terminal's tables use


@dataclass(frozen=True)
class Cell:
    """Text of a table's cell, which may have several lines."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """rows[i][j] is under columns[j]. numbers: which columns are aligned to the right. title: above the table."""

    columns: Sequence[str]
    numbers: Sequence[bool]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG. name: of its file beside the Markdown. text: what is seen, for those who do not."""

    name: str
    text: str
    svg: bytes = field(repr=False)


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: "", "note" (small print) or "warning"."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Items:
    """A list."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Blocks that are opened when wanted."""

    title: str
    blocks: Sequence[Block]


Block = Table | Picture | Text | Items | Details


@dataclass(frozen=True)
class Section:
    """A chapter. caption: on what its figures were measured."""

    key: str
    title: str
    blocks: Sequence[Block]
    caption: str = ""


def from_rich(table: rich.table.Table, title: str = "") -> Table:
    """A table of the terminal as a block."""

    def cell(markup: object) -> Cell:
        from rich.text import Text as RichText

        text = RichText.from_markup(str(markup))
        style = next((str(span.style) for span in text.spans if span.style in (GOOD, FAIR, BAD)), "")
        return Cell(text.plain, style)

    columns = [" ".join(cell(column.header).text.split()) for column in table.columns]
    rows = list(zip(*([cell(one) for one in column.cells] for column in table.columns), strict=True))
    return Table(
        columns, [column.justify == "right" for column in table.columns], rows, title or str(table.title or "")
    )


def html(block: Block) -> str:
    """A block as HTML."""
    match block:
        case Text(text, kind):
            return f"<p{_class(kind)}>{escape(text)}</p>"
        case Items(lines):
            return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
        case Picture(_, text, svg):
            source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
            return f'<figure class="scroll"><img src="{source}" alt="{escape(text)}"></figure>'
        case Details(title, inner):
            return f"<details><summary>{escape(title)}</summary>{''.join(map(html, inner))}</details>"
        case Table(columns, numbers, rows, title):
            head = "".join(
                f'<th scope="col"{_class("number" * number)}>{escape(name)}</th>'
                for name, number in zip(columns, numbers, strict=True)
            )
            body = "".join(
                "<tr>" + "".join(_html_cell(*both) for both in zip(row, numbers, strict=True)) + "</tr>\n"
                for row in rows
            )
            caption = f"<caption>{escape(title)}</caption>" if title else ""
            table = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
            return f'<div class="scroll" tabindex="0">{table}</div>'


def _html_cell(cell: Cell, number: bool) -> str:
    style = " ".join(filter(None, ("number" if number else "", "long" if len(cell.text) > 20 else "", cell.style)))
    return f"<td{_class(style)}>{escape(cell.text).replace(chr(10), '<br>')}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def markdown(block: Block) -> str:
    """A block as GitHub's Markdown."""
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
            lines += [[_markdown_cell(cell) for cell in row] for row in rows]
            table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
            return f"**{plain(title)}**\n\n{table}" if title else table


def _markdown_cell(cell: Cell) -> str:
    text = plain(cell.text, "<br>")
    return f"**{text}**" if cell.style == BAD else text


def plain(text: str, line_break: str = " ") -> str:
    """Text as Markdown that shows it as it is, in one line."""
    escaped = re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\1\2\3", text)
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"^([-+#])", r"\\\1", escaped)
    return line_break.join(escaped.splitlines())


def pictures(blocks: Iterable[Block]) -> list[Picture]:
    """All pictures, also those in details."""
    found: list[Picture] = []
    for block in blocks:
        found += [block] if isinstance(block, Picture) else []
        found += pictures(block.blocks) if isinstance(block, Details) else []
    return found
