"""A lesson for people: on a terminal, and as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import diff_view, terminal
from benchmarks.lesson.lesson import Lesson, files, held_by, rows_of, text_of, tokens_of, words
from benchmarks.lesson.picture import picture
from benchmarks.problems import words_of
from contract.share import HELD
from shardiff.record import PHASES
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType


def parts(lesson: Lesson) -> Iterator[RenderableType]:
    """The lesson on a terminal: text, who holds what, the three files, communication and memory."""
    from rich.syntax import Syntax
    from rich.text import Text

    yield Text(lesson.title, style="bold")
    yield words_of(lesson.run) + "\n"
    for name in lesson.run.strategies:
        yield "\n\n".join(text_of(name)) + "\n"
    yield held_table(lesson)
    for name in lesson.run.strategies:
        for side, source in files(name).items():
            yield Text(f"{name}, {side}", style="bold")
            yield Syntax(source, "python", theme="ansi_light", word_wrap=True)
    yield closed_form(lesson)
    yield memory_line(lesson) + "\n"
    for one in lesson.diffs:
        yield from diff_view.parts(one)
    for one in lesson.naive:
        yield "The naive spelling states how the parameters are split, and little else:"
        yield from diff_view.parts(one)


def held_table(lesson: Lesson) -> RenderableType:
    """For each rank, its rows of the batch, its tokens of each sample, and its part of the first two layers."""
    run, problem = lesson.run, lesson.run.problem
    tokens = ["tokens"] if problem.sequence > 1 else []
    made = terminal.table(
        ["rank", "samples", *tokens, *(of.replace("_", " ") for of in HELD)], [], "Who holds what", gap=2
    )
    for rank in range(min(run.world_size, 16)):
        rows = rows_of(run, rank)
        between = "\n" if tokens else "  "  # the parts of a block are long
        cells = [between.join(map(lambda part: words(part, problem), held_by(run, rank, of))) or "-" for of in HELD]
        same = [cell if i == 0 or cell != cells[0] else "the same" for i, cell in enumerate(cells)]
        pieces = " ".join(f"{piece.start}:{piece.stop}" for piece in tokens_of(run, rank))
        made.add_row(str(rank), f"{rows.start}:{rows.stop}", *([pieces] if tokens else []), *same)
    return made


def closed_form(lesson: Lesson) -> RenderableType:
    """The records of the closed form, those that are alike in one line."""
    made = terminal.table(
        ["phase", "op", "axis", "what"], ["calls", "payload", "wire bytes"], "Closed form of one step", gap=2
    )
    groups: dict[tuple[str, ...], list[int]] = {}
    details: dict[tuple[str, ...], list[str]] = {}
    for r in sorted(lesson.written, key=lambda r: PHASES.index(r.phase)):
        key = (r.phase, r.op, r.axis or "", str(r.payload_bytes), str(r.wire_bytes))
        groups.setdefault(key, [r.payload_bytes, r.wire_bytes, 0])[2] += r.times
        details.setdefault(key, []).append(r.detail or "")
    for key, (payload, wire, calls) in groups.items():
        what = details[key]
        named = what[0] if len(what) == 1 else f"{what[0]}, ..., {what[-1]}"
        made.add_row(*key[:3], named, str(calls), size(payload), size(wire))
    return made


def memory_line(lesson: Lesson) -> str:
    """The memory of the rank that holds most."""
    held = lesson.memory.to_json()
    return "Memory of a rank: " + ", ".join(f"{name.replace('_', ' ')} {size(held[name])}" for name in held) + "."


def page(lesson: Lesson) -> str:
    """The lesson as HTML: the three files side by side."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from rich.console import Console

    here = Path(__file__).with_name("templates")
    styles = Path(__file__).parents[1] / "report" / "templates"
    made = Environment(loader=FileSystemLoader([here, styles]), autoescape=True, undefined=StrictUndefined)

    def printed(one: RenderableType) -> str:
        text = StringIO()
        Console(file=text, width=140, highlight=False, color_system=None).print(one)
        return text.getvalue()

    with tempfile.TemporaryDirectory(prefix="shardiff-") as directory:
        path = Path(directory, "held.svg")
        picture(lesson, path)
        svg = base64.b64encode(path.read_bytes()).decode()
    names = lesson.run.strategies
    return made.get_template("lesson.html.j2").render(
        title=lesson.title,
        sizes=words_of(lesson.run),
        texts={name: text_of(name) for name in names},
        files={name: files(name) for name in names},
        svg=svg,
        closed_form=printed(closed_form(lesson)),
        memory=memory_line(lesson),
        diffs=[(one.target, "".join(map(printed, diff_view.parts(one)))) for one in lesson.diffs],
        naive=[(one.target, "".join(map(printed, diff_view.parts(one)))) for one in lesson.naive],
    )
