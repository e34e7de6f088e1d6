"""The result of `shardiff bench bubbles`; `benchmarks.bubbles.bubbles` says what the fields are. Seconds."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.documents.fields import (
    Count,
    Framework,
    Implementation,
    Name,
    Number,
    Part,
    PositiveSpread,
    Result,
    Several,
    Sizes,
    Spread,
)

BUSY = ("forward", "backward", "backward_input", "backward_weight")


class Event(NamedTuple):
    """What a rank did from start to end, in nanoseconds. kind: of an action (BUSY), "wait" (for data to arrive or to be
    sent), "send" (handing data over), and for compiled programs "communication" and "compute".
    """

    rank: Count
    kind: str
    microbatch: Count | None
    start: Count
    end: Count
    name: str = ""
    chunk: Count = 0


class Pipeline(Part, frozen=True, kw_only=True):
    """What was run."""

    framework: Framework
    implementation: Implementation
    stages: Several
    microbatches: Several
    schedule: Name | None = None  # older results do not say it of a timeline

    @property
    def order(self) -> str:
        """The schedule; in older results, naive with one microbatch, else GPipe's."""
        return self.schedule or ("naive" if self.microbatches == 1 else "gpipe")

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What tells it from the others of a document."""
        return self.implementation, self.order, self.stages, self.microbatches


class Row(Pipeline, frozen=True, kw_only=True):
    """A pipeline's bubble. kept: most bytes of activations at any time, on each stage; kept_theory: the closed form.

    temporaries: bytes that XLA plans for what lives within a step. paced: operations per second of the device whose
    clock was used; null where the CPU's own time was. repeated: samples in which the CPU fell behind that device.
    """

    theory: Number
    measured: Spread
    weighted: Spread | None
    of_theory: Number
    step_seconds: PositiveSpread
    kept: list[Count] | None = None
    kept_theory: list[Count] | None = None
    temporaries: Count | None = None
    paced: Number | None = None
    repeated: Count = 0


class Timeline(Pipeline, frozen=True, kw_only=True):
    """A pipeline's events in one step."""

    events: list[Event]

    def __post_init__(self) -> None:
        for event in self.events:
            if event.start > event.end or event.rank >= self.stages:
                raise ValueError("an event that ends before it starts, or of a rank that is no stage")
        if self.framework == "torch" and not any(event.kind in BUSY for event in self.events):
            raise ValueError("no event is a forward or backward pass")


class Fit(Part, frozen=True, kw_only=True):
    """step = work_seconds (m + p - 1) / m + tick_seconds (m + p - 1)."""

    implementation: Implementation
    stages: Several
    work_seconds: Number
    tick_seconds: Number
    worst_residual: Number


class Skipped(Part, frozen=True, kw_only=True):
    """What was not measured, and why."""

    stages: Several
    reason: str


class Settings(Sizes, frozen=True, kw_only=True):
    """iterations: steps of each pipeline. paced_seconds: of a microbatch's forward pass through a paced stage."""

    iterations: Several
    paced_seconds: Number | None = None


class Bubbles(Result, frozen=True, kw_only=True):
    """The bubble of every pipeline."""

    method: dict[str, str]
    settings: Settings
    skipped: list[Skipped]
    rows: list[Row]
    fits: list[Fit]
    timelines: list[Timeline]

    def __post_init__(self) -> None:
        rows = {row.key for row in self.rows}
        for i, one in enumerate(self.timelines):
            if one.key not in rows:
                raise ValueError(f"timelines[{i}] is of no row")
