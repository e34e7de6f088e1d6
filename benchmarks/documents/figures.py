"""Figures from samples: medians with quartiles, ratios, and documents that are never half written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

Spread = dict[str, float]  # {"median", "q1", "q3"}


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method); of one value, itself three times."""
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def over_ranks(samples: Sequence[Sequence[float]]) -> list[float]:
    """Of samples[rank][iteration], the slowest rank of each iteration: a step is over when all are done."""
    return [max(each) for each in zip(*samples, strict=True)]


def adjacent_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratios of iterations taken one right after the other, so that slow changes of the machine cancel."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def round_ratios(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Of samples[round][iteration], the ratio of the medians of each round."""
    return [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True)]
