"""How good the predictions were: errors, the choice of the mesh, and crossovers predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

WITHIN = 0.05  # of the best mesh, for a choice to count as right
Entry = dict[str, Any]


def summary(configurations: Sequence[Entry]) -> dict[str, Any] | None:
    """Of all configurations that were measured; None if there are none."""
    done = [one for one in configurations if one["measured"]]
    if not done:
        return None
    return {
        "configurations": len(done),
        "simulation": errors(done, "seconds"),
        "undisturbed": len(calm := [one for one in done if not one["measured"]["kept_flagged"]]),
        "simulation_undisturbed": errors(calm, "seconds") if calm else None,
        "max_of_compute_and_communication": errors(done, "max_of_compute_and_communication"),
        "memory": errors(done, "memory_bytes"),
        "choices": choices(done, "seconds"),
        "choices_by_max": choices(done, "max_of_compute_and_communication"),
        "crossovers": list(crossovers(done)),
        "samples_flagged": sum(one["measured"]["flagged"] for one in done),
    }


def errors(done: Sequence[Entry], name: str) -> dict[str, float]:
    """|predicted / measured - 1|: median, 90th percentile and largest. name: of what is predicted."""
    of = "memory_bytes" if name == "memory_bytes" else "seconds"
    found = sorted(abs(one["predicted"][name] / one["measured"][of] - 1) for one in done)
    return {
        "median": median(found),
        "p90": float(np.percentile(found, 90, method="inverted_cdf")),
        "largest": found[-1],
    }


def groups(done: Sequence[Entry], *names: str) -> Iterator[list[Entry]]:
    """The configurations that have these fields in common."""
    found: dict[tuple[object, ...], list[Entry]] = {}
    for one in done:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    yield from found.values()


def choices(done: Sequence[Entry], name: str) -> dict[str, int]:
    """How often the mesh that is predicted to be the fastest is the fastest, or within 5 % of it, where several were
    measured."""
    right = total = 0
    for those in groups(done, "shape", "rate_bits_per_second", "batch", "width"):
        if len(those) > 1:
            chosen = min(those, key=lambda one: one["predicted"][name])
            best = min(one["measured"]["seconds"] for one in those)
            right += chosen["measured"]["seconds"] <= best * (1 + WITHIN)
            total += 1
    return {"right": right, "of": total}


def crossovers(done: Sequence[Entry]) -> Iterator[dict[str, Any]]:
    """Rates at which two meshes take as long, predicted and measured: both between the same two rates, at which their
    order changes, along straight lines of time over 1 / rate. apart: by how much the measured times of the two differ
    at the predicted rate. steep: how much their ratio changes with the rate, as a power of it."""
    for those in groups(done, "shape", "batch", "width"):
        lines: dict[str, dict[float, Entry]] = {}
        for one in those:
            lines.setdefault(mesh_of(one), {})[one["rate_bits_per_second"]] = one
        for a, b in combinations(lines, 2):
            rates = sorted(lines[a].keys() & lines[b].keys())
            for low, high in zip(rates, rates[1:], strict=False):
                pairs = [
                    [
                        Line(low, high, *(of[rate][kind]["seconds"] for rate in (low, high)))
                        for of in (lines[a], lines[b])
                    ]
                    for kind in ("predicted", "measured")
                ]
                predicted, measured = (crossing(*pair) for pair in pairs)
                if predicted is not None and measured is not None:
                    first, second = (line.at(predicted) for line in pairs[1])
                    yield {
                        "shape": those[0]["shape"],
                        "batch": those[0]["batch"],
                        "width": those[0]["width"],
                        "meshes": [a, b],
                        "predicted_bits_per_second": predicted,
                        "measured_bits_per_second": measured,
                        "apart": max(first, second) / min(first, second) - 1,
                        "steep": abs(math.log(pairs[1][0].ratio / pairs[1][1].ratio)) / math.log(high / low),
                    }


def mesh_of(one: Entry) -> str:
    """dp=2,tp=2"""
    return ",".join(f"{name}={size}" for name, size in one["predicted"]["mesh"].items())


class Line(NamedTuple):
    """Seconds at two rates, and in between: what is sent takes time in proportion to 1 / rate, all else takes the same
    time."""

    low: float
    high: float
    at_low: float
    at_high: float

    @property
    def ratio(self) -> float:
        """Of the times at both rates."""
        return self.at_low / self.at_high

    def at(self, rate: float) -> float:
        share = (1 / self.low - 1 / rate) / (1 / self.low - 1 / self.high)
        return self.at_low + share * (self.at_high - self.at_low)


def crossing(a: Line, b: Line) -> float | None:
    """The rate at which two lines between the same rates cross."""
    before, after = a.at_low - b.at_low, a.at_high - b.at_high
    if before * after >= 0:
        return None
    share = before / (before - after)
    return 1 / (1 / a.low + share * (1 / a.high - 1 / a.low))
