"""Who holds what: for each rank its rows of the batch and its part of the first two layers, with what moves them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.lesson.lesson import Lesson, held_by, rows_of, tokens_of
from contract.share import HELD
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.diff.view import COLOURS, OTHER
from shardiff.record import PHASES
from shardiff.system.files import save
from shardiff.system.words import size

MOST_RANKS = 8  # that are drawn; the others hold parts like these
HELD_BY, OUTLINE = "#0072B2", "#888888"
COLUMN, LINE = 1.45, 0.22  # of a rank, and of a line of text; the side of a matrix is 1


def picture(lesson: Lesson, path: Path) -> None:
    """Draw to a PNG or an SVG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run, moves = lesson.run, moved(lesson)
    ranks, lines = min(run.world_size, MOST_RANKS), rows(run)
    width, height = COLUMN * ranks + 1.7, 0.9 + 1.5 * len(lines) + LINE * (len(moves) + 1.5)
    figure = Figure(figsize=(max(6.0, 0.95 * width), 0.95 * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axis("off")
    axes.set_aspect("equal")
    axes.set_xlim(-1.7, width - 1.7)
    axes.set_ylim(height - 0.9, -0.9)
    for rank in range(ranks):
        at = " ".join(f"{name}{i}" for name, i in run.mesh.coordinates(rank).items())
        axes.text(COLUMN * rank + 0.5, -0.12, f"rank {rank}\n{at}", ha="center", va="bottom", fontsize=8)
    for i, (label, of, layer) in enumerate(lines):
        axes.text(-0.2, 1.5 * i + 0.5, label, ha="right", va="center", fontsize=9)
        for rank in range(ranks):
            draw_part(axes, (COLUMN * rank, 1.5 * i), run, rank, of, layer)
    below = 1.5 * len(lines) + LINE
    axes.text(-1.6, below, "One step, and what a rank must send:", va="center", fontsize=9)
    for i, (text, colour) in enumerate(moves, 1):
        axes.text(-1.4, below + LINE * i, text, va="center", fontsize=9, color=colour)
    more = f"; {run.world_size - ranks} more ranks hold parts like these" if run.world_size > ranks else ""
    figure.suptitle(f"{lesson.title}: what each rank holds{more}", fontsize=11)
    save(figure, path)


def rows(run: Run) -> list[tuple[str, str, int]]:
    """(label, what is held, layer) of each row; gradients and optimizer state where they are split otherwise."""
    of_tokens = run.problem.sequence > 1
    found = [("samples, tokens\nX[B, S, D]" if of_tokens else "samples\nX[B, D]", "batch", 0)]
    for layer in range(min(2, run.problem.depth)):
        found.append((f"layer {layer}\n{', '.join(drawn(run, layer))}", HELD[0], layer))
    for of, word in ((HELD[1], "gradient"), (HELD[2], "optimizer state")):
        if any(held_by(run, rank, of) != held_by(run, rank, HELD[0]) for rank in range(run.world_size)):
            found.append((f"{word}\nof layer 0", of, 0))
    return found


def drawn(run: Run, layer: int) -> list[str]:
    """The names of a layer's parameters in the order in which they are drawn: matrices, and a vector below them."""
    shape = run.problem.shape(layer)
    ordered = sorted(zip(shape._fields, shape, strict=True), key=lambda one: len(one[1]) == 1)
    return [name if isinstance(run.problem, Transformer) else name.replace("w", "W") for name, _ in ordered]


def draw_part(axes: Any, place: tuple[float, float], run: Run, rank: int, of: str, layer: int) -> None:
    """Whole arrays in outline, and a rank's parts in colour: of a layer the matrices, and a vector below them."""
    from matplotlib.patches import Rectangle

    left, top = place

    def box(x: float, y: float, width: float, height: float, colour: str = "none") -> None:
        axes.add_patch(
            Rectangle((left + x, top + y), width, height, facecolor=colour, edgecolor=OUTLINE, linewidth=0.8)
        )

    if of == "batch":
        box(0, 0, 1, 1)
        mine, total, tokens = rows_of(run, rank), run.problem.batch, run.problem.sequence
        for piece in tokens_of(run, rank):
            across, down = (piece.stop - piece.start) / tokens, (mine.stop - mine.start) / total
            box(piece.start / tokens, mine.start / total, across, down, HELD_BY)
        return
    shapes = run.problem.shape(layer)
    matrices = [i for i, shape in enumerate(shapes) if len(shape) > 1]
    (vector,) = (i for i, shape in enumerate(shapes) if len(shape) == 1)
    side = 1 / len(matrices)
    across = side if len(matrices) == 1 else 0.9 * side
    for column in range(len(matrices)):
        box(column * side, 0, across, 1)
    box(0, 1.08, 1, 0.12)
    for part in held_by(run, rank, of):
        if part.layer == layer:
            for column, i in enumerate(matrices):
                for x, y, width, height in pieces_of(part.cuts[i], shapes[i]):
                    box(column * side + x * across, y, width * across, height, HELD_BY)
            (length,) = shapes[vector]
            start, stop, _ = part.cuts[vector][0].indices(length)
            box(start / length, 1.08, (stop - start) / length, 0.12, HELD_BY)


def pieces_of(cut: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[float, float, float, float]]:
    """A part of a matrix as (x, y, width, height) in shares of the whole; of several matrices, one below the other."""
    (first, end, _), (start, stop, _) = (s.indices(size) for s, size in zip(cut[-2:], shape[-2:], strict=True))
    rows, columns = shape[-2:]
    many, these = (shape[0], range(*cut[0].indices(shape[0]))) if len(shape) == 3 else (1, range(1))
    sized = (stop - start) / columns, (end - first) / rows / many
    return [(start / columns, (i + first / rows) / many, *sized) for i in these]


def moved(lesson: Lesson) -> list[tuple[str, str]]:
    """A line, and its colour, for each phase, axis and op: how often, and how many bytes a rank must send."""
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for record in lesson.written:
        found = sums[record.phase, record.axis or "", record.op]
        found[0] += record.times
        found[1] += record.times * record.wire_bytes
    ordered = sorted(sums.items(), key=lambda item: PHASES.index(item[0][0]))
    return [
        (f"{phase}: {calls} {op} over {axis}, {size(wire)}", COLOURS.get(op, OTHER))
        for (phase, axis, op), (calls, wire) in ordered
    ]
