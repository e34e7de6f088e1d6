"""The result of `shardiff diff STRATEGY --json` for several strategies and targets."""

from __future__ import annotations

from benchmarks.documents.fields import Count, Name, Part, Result, Several, Sizes
from benchmarks.documents.steps import Strategy, Work
from contract.axes import parse_axes
from contract.strategy import Run
from shardiff.diff.rows import Row
from shardiff.record import Record


class Side(Part, frozen=True, kw_only=True):
    """What one side communicates in a step."""

    records: list[Record]


class Written(Side, frozen=True, kw_only=True):
    """traced: whether it was traced in a run of as many ranks; else it is the closed form."""

    traced: bool


class Derived(Side, frozen=True, kw_only=True):
    """memory: bytes of a device by kind, as the compiler planned them. work: what it does besides communicating."""

    memory: dict[str, Count]
    work: Work | None = None


class Diff(Part, frozen=True, kw_only=True):
    """One strategy on one target: what is written on the left, what is derived on the right.

    problem: where it is not that of all diffs.
    """

    strategy: Strategy
    implementation: Name
    target: Name
    mesh: dict[str, Several]
    left: Written
    right: Derived
    closed_form: Side
    rows: list[Row]
    problem: Sizes | None = None


class Skipped(Part, frozen=True, kw_only=True):
    """A target that was left out, and why."""

    target: Name
    reason: str


class Settings(Sizes, frozen=True, kw_only=True):
    """The problem, and the microbatches of pipeline_parallel."""

    microbatches: Several


class Diffs(Result, frozen=True, kw_only=True):
    """Several strategies on several targets."""

    settings: Settings
    diffs: list[Diff]
    skipped: list[Skipped]

    def __post_init__(self) -> None:
        self.runs_of_diffs()

    def runs_of_diffs(self) -> list[Run]:
        """The run of each diff. Raises ValueError for one that cannot be."""
        found = []
        for one in self.diffs:
            own = one.problem or self.settings
            mesh = ",".join(f"{axis}={size}" for axis, size in one.mesh.items())
            axes = parse_axes(mesh, tuple(one.strategy.split(" x ")))
            rest = {"microbatches": self.settings.microbatches, "recompute": own.recompute}
            found.append(Run(one.implementation, axes, own.problem, **rest))
        return found
