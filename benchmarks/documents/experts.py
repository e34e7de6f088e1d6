"""The result of `shardiff bench experts`; `benchmarks.experts.experts` says what the fields are. Seconds."""

from __future__ import annotations

from benchmarks.documents.fields import (
    Amount,
    Count,
    Name,
    Part,
    PositiveSpread,
    Result,
    Several,
    Sizes,
)


class Row(Part, frozen=True, kw_only=True):
    """One skew on one number of ranks."""

    ranks: Several
    skew: Amount
    busiest_expert: Amount
    busiest_rank: Amount
    capacity: Count
    capacity_factor: Amount
    dropped: Amount
    slots: Amount
    difference: Amount
    contestants: dict[Name, PositiveSpread]
    over_even: dict[Name, PositiveSpread]


class Settings(Sizes, frozen=True, kw_only=True):
    """iterations of each contestant."""

    iterations: Several


class Imbalance(Result, frozen=True, kw_only=True):
    """Passes with more and less popular experts, timed."""

    method: dict[str, str]
    settings: Settings
    rows: list[Row]
    failures: list[str]

    @property
    def holds(self) -> bool:
        """Whether ours and the library equivalent compute the same gradients."""
        return not self.failures
