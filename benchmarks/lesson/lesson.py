"""What a lesson shows of a strategy, or of the strategies of a mesh, as data: all of it is read or computed, not told.

The files of the three implementations; who holds which rows and columns; what is communicated by the closed form, in a
traced run, and as XLA derives it; and the memory of a rank.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.problems import sizes_of
from contract import cost, strategies
from contract.layout import layout
from contract.memory import Memory, memory
from contract.problem import Problem
from contract.share import HELD, Part, names, narrow
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.record import Record, totals

if TYPE_CHECKING:
    from benchmarks.diff_strategies import StrategyDiff

SIDES = {"torch": "torch_impl.explicit", "shard_map": "jax_impl.shard_map", "annotated": "jax_impl.annotated"}


@dataclass(frozen=True)
class Lesson:
    """run: what is shown, in torch. diffs: what XLA derives from the annotations for each target, beside the trace.

    naive: the same for the spelling that a strategy avoids, where it has one.
    """

    run: Run
    diffs: tuple[StrategyDiff, ...]
    naive: tuple[StrategyDiff, ...]

    @property
    def title(self) -> str:
        """The strategy and the mesh, and what is trained if it is not the MLP."""
        of = " in a transformer" if isinstance(self.run.problem, Transformer) else ""
        return f"{self.run.strategy} on {self.run.mesh}{of}"

    @property
    def written(self) -> list[Record]:
        """The closed form of what one step communicates."""
        return cost.communication(self.run)

    @property
    def memory(self) -> Memory:
        """What the rank that holds most holds in one step."""
        return max(memory(self.run), key=lambda held: sum(held.to_json().values()))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "schema": 1,
            "strategy": self.run.strategy,
            "mesh": dict(self.run.mesh.axes),
            **({"problem": sizes_of(self.run)} if isinstance(self.run.problem, Transformer) else {}),
            "files": {name: files(name) for name in self.run.strategies},
            "held": {
                of: [[words(part, self.run.problem) for part in parts] for parts in layout(self.run, of)] for of in HELD
            },
            "closed_form": {"records": [r.to_json() for r in self.written], "totals": totals(self.written)},
            "memory": self.memory.to_json(),
            "diffs": [one.to_json() for one in self.diffs],
            "naive": [one.to_json() for one in self.naive],
        }


def words(part: Part, problem: Problem) -> str:
    """A part as NumPy would index it: w0[0:256, :] b0[0:256]."""

    def index(s: slice, size: int) -> str:
        start, stop, _ = s.indices(size)
        return ":" if (start, stop) == (0, size) else f"{start}:{stop}"

    each = zip(names(part), part.cuts, problem.shape(part.layer), strict=True)
    return " ".join(f"{name}[{', '.join(map(index, cut, shape))}]" for name, cut, shape in each)


def files(strategy: str) -> dict[str, str]:
    """The source of a strategy in each implementation that has it."""
    modules = {side: f"{package}.{strategy}" for side, package in SIDES.items()}
    return {side: source_of(module) for side, module in modules.items() if find_spec(module)}


def source_of(module: str) -> str:
    """The source of a module, which is not imported: that would take a framework's seconds."""
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return Path(found.origin).read_text()


def text_of(strategy: str) -> list[str]:
    """The paragraphs in which the contract describes a strategy: what is split, and what is communicated."""
    text = inspect.getdoc(strategies.of(strategy)) or ""
    return [" ".join(one.split()) for one in text.split("\n\n")]


def rows_of(run: Run, rank: int) -> slice:
    """The rows of the batch that a rank has, as neighbours: strategies that split samples split them in turn."""
    at, start, count = run.mesh.coordinates(rank), 0, run.problem.batch
    for axis in run.cutting_the_batch:
        sizes = strategies.of(axis.strategy).rows(count, axis.size)
        if sum(sizes) == count:  # else every rank has all of them
            start, count = start + sum(sizes[: at[axis.name]]), sizes[at[axis.name]]
    return slice(start, start + count)


def tokens_of(run: Run, rank: int) -> list[slice]:
    """The pieces of every sample that a rank has between the layers: one, or two in ring_attention's zigzag."""
    at, pieces = run.mesh.coordinates(rank), [slice(0, run.problem.sequence)]
    for axis in run.cutting_the_batch:
        i, n = at[axis.name], axis.size
        if axis.strategy == "ring_attention":
            pieces = [narrow(pieces[0], run.problem.sequence, 2 * n, one) for one in (i, 2 * n - 1 - i)]
        elif axis.name == "cp":
            pieces = [narrow(pieces[0], run.problem.sequence, n, i)]
        elif axis.strategy == "sequence_parallel":
            pieces = shared(pieces, n, i)
    return pieces


def shared(pieces: list[slice], n: int, index: int) -> list[slice]:
    """Share number `index` of `n` of the tokens of these pieces, in their order."""
    size = sum(piece.stop - piece.start for piece in pieces) // n
    first, found = index * size, []
    for piece in pieces:
        length = piece.stop - piece.start
        start, stop = max(first, 0), min(first + size, length)
        found += [slice(piece.start + start, piece.start + stop)] if start < stop else []
        first -= length
    return found


def held_by(run: Run, rank: int, of: str) -> list[Part]:
    """The parts of the first two layers that a rank holds: no strategy knows more than even and odd layers."""
    return [part for part in layout(run, of)[rank] if part.layer < 2]
