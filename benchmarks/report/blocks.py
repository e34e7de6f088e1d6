"""What a report is made of: blocks, which know neither HTML nor Markdown. All text in them is plain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import rich.table

GOOD, FAIR, BAD = "green", "yellow", "red"  # styles of cells, by the names that the terminal's tables use


@dataclass(frozen=True)
class Cell:
    """A table's cell, whose text may have several lines."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """rows[i][j] is under columns[j]. numbers: which columns are aligned to the right. title: above the table."""

    form: ClassVar = "table"
    columns: Sequence[str]
    numbers: Sequence[bool]
    rows: Sequence[Sequence[Cell]]
    title: str = ""


@dataclass(frozen=True)
class Picture:
    """An SVG. name: of its file beside the Markdown. text: what it shows, for those who cannot see it."""

    form: ClassVar = "picture"
    name: str
    text: str
    svg: bytes = field(repr=False)


@dataclass(frozen=True)
class Text:
    """A paragraph. kind: "", "note" (small print) or "warning"."""

    form: ClassVar = "text"
    text: str
    kind: str = ""


@dataclass(frozen=True)
class Items:
    """A list."""

    form: ClassVar = "items"
    lines: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Blocks that are hidden until the reader opens them."""

    form: ClassVar = "details"
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
        return Cell(" ".join(text.plain.split("\n")), style)

    columns = [" ".join(cell(column.header).text.split()) for column in table.columns]
    rows = list(zip(*([cell(one) for one in column.cells] for column in table.columns), strict=True))
    numbers = [column.justify == "right" for column in table.columns]
    return Table(columns, numbers, rows, title or str(table.title or ""))


def pictures(blocks: Iterable[Block]) -> list[Picture]:
    """All pictures, also those in details."""
    found: list[Picture] = []
    for block in blocks:
        found += [block] if isinstance(block, Picture) else []
        found += pictures(block.blocks) if isinstance(block, Details) else []
    return found
