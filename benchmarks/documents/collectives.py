"""The result of `shardiff bench collectives`. Times are seconds, bandwidths 1e9 bytes a second."""

from __future__ import annotations

from typing import Annotated

from benchmarks.documents.fields import Amount, Framework, Name, Part, Positive, Result, Several, among

OPS = {  # ours -> the name in shardiff.record, by which the bytes are counted
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "permute": "collective_permute",
}
Op = Annotated[str, among(OPS)]


class Row(Part, frozen=True, kw_only=True):
    """One payload of one op in one mode; `benchmarks.collectives.numbers` says what the fields are."""

    implementation: Framework
    op: Op
    runs_as: Name
    ranks: Several
    bytes: Several
    mode: Name
    iterations: Several
    min_s: Positive
    median_s: Positive
    p99_s: Positive
    rank_min_s: Positive
    rank_mean_s: Positive
    rank_max_s: Positive
    algbw_GBps: Positive
    busbw_GBps: Amount
    correct: bool


class Fit(Part, frozen=True, kw_only=True):
    """t = alpha + S/beta; beta is null where time does not grow with size. Older results have fits to three sizes too,
    whose misfit is null."""

    implementation: Framework
    op: Op
    ranks: Several
    mode: Name
    alpha_s: Amount
    beta_GBps: Positive | None
    bus_beta_GBps: Amount | None
    relative_error: Amount | None
    largest_relative_error: Amount | None = None


class Identity(Part, frozen=True, kw_only=True):
    """Two programs that must give equal values."""

    implementation: Name
    ranks: Several
    identity: str
    holds: bool


class Flat(Part, frozen=True, kw_only=True):
    """Whether busbw stays the same as ranks are added, and the sentence that says so."""

    is_flat: bool
    sentence: str


class Floor(Part, frozen=True, kw_only=True):
    """What the machine can do without a collective. loopback_GBps: by the number of streams."""

    memory_copy_GBps: Positive
    loopback_GBps: dict[str, Positive]


class Settings(Part, frozen=True, kw_only=True):
    """budget: seconds for one size and mode. threads_per_rank: by the number of ranks."""

    ranks: list[Several]
    iterations: Several
    budget: Positive
    transport: Name
    device: Name
    threads_per_rank: dict[str, Several]


class Collectives(Result, frozen=True, kw_only=True):
    """Every collective of both frameworks, timed."""

    method: list[str]
    settings: Settings
    floor: Floor | None
    rows: list[Row]
    fits: list[Fit]
    identities: list[Identity]
    flat: Flat | None

    @property
    def holds(self) -> bool:
        """Whether all values are correct and all identities hold."""
        return all(row.correct for row in self.rows) and all(one.holds for one in self.identities)
