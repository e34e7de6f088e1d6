"""A diff for people: a table in phases with bars of bytes, and one picture for a strategy on several targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from shardiff.diff.record_view import members, operation, summary, times
from shardiff.diff.rows import Row
from shardiff.diff.rules import OTHER_RANKS, WHY, labels, sentence
from shardiff.program import Program
from shardiff.record import PHASES, Record
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

BAR = 14  # columns of the longest bar
# Okabe and Ito's colours, which colour-blind readers can tell apart (jfly.uni-koeln.de/color).
COLOURS = {
    "all_gather": "#0072B2",
    "reduce_scatter": "#E69F00",
    "all_reduce": "#D55E00",
    "collective_permute": "#009E73",
    "all_to_all": "#CC79A7",
}
OTHER = "#999999"


def describe(records: Sequence[Record], with_async: bool = True, with_ranks: bool = False) -> str:
    """Equal records in one line: `3 x all_gather 1.05 MB bfloat16 (1 async)`, if asked with who takes part."""
    alike: dict[str, list[Record]] = {}
    for r in records:
        often = "" if times(r) == "1" else f" {times(r)} times"
        text = f"{operation(r)} {size(r.payload_bytes)}{often}"
        text += "" if r.dtype.startswith("float32") else f" {r.dtype}"
        text += f", ranks {members(r)}" if with_ranks else ""
        alike.setdefault(text, []).append(r)
    lines = []
    for text, group in alike.items():
        count = sum(r.is_async for r in group)
        note = f" ({count} async)" if 0 < count < len(group) else " async" if count else ""
        lines.append((f"{len(group)} x " if len(group) > 1 else "") + text + (note if with_async else ""))
    return "\n".join(lines) or "-"


def phase_of(row: Row) -> str:
    """The phase under which a row is shown: that of its left records, the earliest if there are several."""
    return min((record.phase for record in row.left or row.right), key=PHASES.index)


def told(row: Row, names: tuple[str, str]) -> str:
    """The verdict in a table: the rules' names, or what the only side with records is called."""
    if row.rules == ("global_value",) and row.left and row.right:
        left, right = (sum(r.payload_bytes * r.times for r in side) for side in (row.left, row.right))
        return f"same, and {size(abs(left - right))} of global value"
    if row.rules:
        return ", ".join(row.rules).replace("_", " ")
    return {"only left": f"only {names[0]}", "only right": f"only {names[1]}"}.get(row.verdict, row.verdict)


def table(rows: Sequence[Row], names: tuple[str, str]) -> Table:
    """The rows in phases, those that are alike in one line. names: what the sides are called."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds = (told(row, names), *(describe(side, with_async=False) for side in (row.left, row.right)))
        alike.setdefault((phase_of(row), *kinds, row.verdict, row.rules), []).append(row)
    most = max([sum(max(row.bytes.values()) for row in group) for group in alike.values()] + [1])

    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("phase", *names, "verdict"):
        result.add_column(escape(name), overflow="fold")
    result.add_column("wire bytes", no_wrap=True)
    shown = None
    for phase in PHASES:
        for (where, *_), group in alike.items():
            if where != phase:
                continue
            left, right = ([record for row in group for record in getattr(row, side)] for side in ("left", "right"))
            colour = "red" if group[0].unexplained else "green" if group[0].verdict == "same" else "yellow"
            among = OTHER_RANKS in group[0].rules
            sides = (escape(describe(side, with_ranks=among)) for side in (left, right))
            cells = (phase if phase != shown else "", *sides, f"[{colour}]{escape(told(group[0], names))}[/]")
            bars = (bar(sum(row.bytes[side] for row in group), most) for side in ("left", "right"))
            result.add_row(*cells, "\n".join(bars))
            shown = phase
    return result


def bar(amount: int, most: int) -> str:
    """A bar and its number."""
    length = amount / most * BAR
    full, part = int(length), " ▏▎▍▌▋▊▉"[int(length % 1 * 8)]
    return f"{('█' * full + part).strip().ljust(BAR)} {size(amount):>8}"


def notes(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """A sentence for each rule that was used, and a line for each row that no rule explains."""
    lines = [
        f"{rule.replace('_', ' ')}: {sentence(rule, row.left, row.right, names)}."
        for rule in WHY
        for row in rows
        if rule in row.rules
    ]
    lines += [f"{told(row, names)}: {row.why}." for row in rows if row.verdict.startswith("only")]
    return "\n".join(dict.fromkeys(lines))


def sizes(left: Program, right: Program, names: tuple[str, str]) -> str:
    """A sentence where the programs run on different numbers of ranks, so that their bytes are not comparable."""

    def ranks(program: Program) -> int:
        of = {(record.groups, record.edges) for record in program.records}
        return len({rank for groups, edges in of for some in (*(groups or ()), *(edges or ())) for rank in some})

    mine, theirs = ranks(left), ranks(right)
    if not mine or not theirs or mine == theirs:
        return ""
    return f"The collectives of {names[0]} are among {mine} ranks, those of {names[1]} among {theirs}."


def parts(left: Program, right: Program, rows: Sequence[Row]) -> Iterator[RenderableType]:
    """The whole diff: the table, what each side communicates, and the sentences."""
    from rich.text import Text

    names = labels(left.label, right.label)
    yield table(rows, names)
    yield Text("\n".join(f"{name}: {summary(side.records)}" for name, side in zip(names, (left, right), strict=True)))
    if lines := "\n".join(filter(None, (sizes(left, right, names), notes(rows, names)))):
        yield Text(lines)


def as_text(left: Program, right: Program, rows: Sequence[Row], width: int = 140) -> str:
    """The diff as plain text."""
    from rich.console import Console

    text = StringIO()
    console = Console(file=text, width=width, highlight=False, color_system=None)
    for part in parts(left, right, rows):
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


HTML = """<table style="border-collapse: collapse; text-align: left; white-space: pre-line">
<tr>{% for name in columns %}<th style="text-align: left">{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>
<td>{{ row.phase }}</td><td>{{ row.left }}</td><td>{{ row.right }}</td>
<td style="color: {{ row.colour }}">{{ row.verdict }}</td>
<td style="text-align: right">{{ row.bytes }}</td>
</tr>{% endfor %}
</table>
{% for line in lines if line %}<p>{{ line }}</p>{% endfor %}"""


def as_html(left: Program, right: Program, rows: Sequence[Row]) -> str:
    """The diff as HTML for a notebook. Everything that comes from a program is escaped."""
    from jinja2 import Environment

    names = labels(left.label, right.label)
    shown = [
        {
            "phase": phase_of(row),
            **{s: describe(getattr(row, s), with_ranks=OTHER_RANKS in row.rules) for s in ("left", "right")},
            "verdict": told(row, names),
            "colour": "#D55E00" if row.unexplained else "#009E73" if row.verdict == "same" else "#B07A00",
            "bytes": "\n".join(map(size, row.bytes.values())),
        }
        for row in sorted(rows, key=lambda row: PHASES.index(phase_of(row)))
    ]
    lines = [f"{name}: {summary(side.records)}" for name, side in zip(names, (left, right), strict=True)]
    lines += [sizes(left, right, names), *notes(rows, names).splitlines()]
    template = Environment(autoescape=True).from_string(HTML)
    return template.render(columns=["phase", *names, "verdict", "wire bytes"], rows=shown, lines=lines)
