"""From seconds to figures: statistics, bandwidths, the fit t = alpha + S/beta, and whether busbw is flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.documents.collectives import OPS
from shardiff.record import wire_factor

FLAT = 0.10  # busbw counts as flat if it changes by less
ENOUGH = 5  # sizes: to fewer, two parameters fit so well that nothing is known of their error

Row = dict[str, Any]


def statistics(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of seconds[rank][iteration]: an iteration takes as long as its slowest rank.

    min_s, median_s, p99_s: over iterations, of the slowest rank. p99 is by nearest rank: the maximum of fewer than 100.
    rank_min_s, rank_mean_s, rank_max_s: over ranks, of each rank's median.
    """
    times = np.asarray(seconds, np.float64)
    slowest, own = times.max(axis=0), np.median(times, axis=1)
    return {
        "min_s": float(slowest.min()),
        "median_s": float(np.median(slowest)),
        "p99_s": float(np.percentile(slowest, 99, method="inverted_cdf")),
        "rank_min_s": float(own.min()),
        "rank_mean_s": float(own.mean()),
        "rank_max_s": float(own.max()),
    }


def bandwidths(op: str, ranks: int, payload: int, seconds: float) -> dict[str, float]:
    """algbw = S/t and busbw = algbw x factor in GB/s, GB = 1e9 bytes (nccl-tests, doc/PERFORMANCE.md)."""
    algbw = payload / seconds / 1e9
    return {"algbw_GBps": algbw, "busbw_GBps": algbw * float(wire_factor(OPS[op], ranks))}


def rows(implementation: str, op: str, ranks: int, by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[Row]:
    """A row for each payload and mode, from what `measure` gave on each rank for each payload."""
    result = []
    for measured in zip(*by_rank, strict=True):
        payload = measured[0]["bytes"]
        for mode in ("per_iteration", "amortized", "bare"):
            if mode not in measured[0]:
                continue
            times = statistics([one[mode] for one in measured])
            result.append(
                {
                    "implementation": implementation,
                    "op": op,
                    "runs_as": measured[0]["runs_as"],
                    "ranks": ranks,
                    "bytes": payload,
                    "mode": mode,
                    "iterations": len(measured[0][mode]) * (1 if mode == "per_iteration" else measured[0]["calls"]),
                    **times,
                    **bandwidths(op, ranks, payload, times["median_s"]),
                    "correct": all(one["correct"] and one["right"][mode] for one in measured),
                }
            )
    return result


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float | None, np.ndarray]:
    """alpha in s, beta in bytes/s, and for each size |fit - t|/t, of t = alpha + S/beta.

    By least absolute relative error: the sum of |fit - t|/t is minimized, by least squares that are weighted anew until
    they settle. Relative, or the largest size alone would decide; absolute, so that a few disturbed sizes do not. alpha
    is 0 rather than negative, beta None where time does not grow with size.
    """
    s, t = np.asarray(sizes, np.float64), np.asarray(seconds, np.float64)
    alpha, slope = 0.0, 0.0
    misfit, weights = np.zeros_like(t), np.ones_like(t)
    for _ in range(50):
        columns = np.stack([weights / t, weights * s / t], axis=1)
        alpha, slope = np.linalg.lstsq(columns, weights, rcond=None)[0]
        if alpha < 0 or slope < 0:  # the other one alone
            kept = columns[:, int(alpha < 0)]
            best = kept @ weights / (kept @ kept)
            alpha, slope = (0.0, best) if alpha < 0 else (best, 0.0)
        misfit = np.abs((alpha + slope * s) / t - 1)
        weights = 1 / np.sqrt(np.maximum(misfit, 1e-4))
    return float(alpha), float(1 / slope) if slope > 0 else None, misfit


def fits(measured: Sequence[Row]) -> list[dict[str, Any]]:
    """alpha_s and beta of the medians, for each implementation, op, world size and mode with ENOUGH sizes, and the
    misfit: its median over the sizes, and the largest."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in measured:
        groups.setdefault((row["implementation"], row["op"], row["ranks"], row["mode"]), []).append(row)
    result = []
    for (implementation, op, ranks, mode), group in groups.items():
        if len(group) < ENOUGH:
            continue
        alpha, beta, misfit = fit([row["bytes"] for row in group], [row["median_s"] for row in group])
        bus = None if beta is None else beta * float(wire_factor(OPS[op], ranks))
        result.append(
            {
                "implementation": implementation,
                "op": op,
                "ranks": ranks,
                "mode": mode,
                "alpha_s": alpha,
                "beta_GBps": None if beta is None else beta / 1e9,
                "bus_beta_GBps": None if bus is None else bus / 1e9,
                "relative_error": float(np.median(misfit)),
                "largest_relative_error": float(misfit.max()),
            }
        )
    return result


def flat(measured: Sequence[Row], cores: int) -> dict[str, Any] | None:
    """Is busbw flat as ranks are added? From the fewest ranks above one to the most, at the largest payload of both.

    {"is_flat", "from_ranks", "to_ranks", "ratios": [{"implementation", "op", "bytes", "ratio", ...}], "sentence"}; None
    where only one world size was measured.
    """
    counts = sorted({row["ranks"] for row in measured if row["ranks"] > 1})
    if len(counts) < 2:
        return None
    few, many = counts[0], counts[-1]
    busbw = {
        (row["implementation"], row["op"], row["bytes"], row["ranks"]): row["busbw_GBps"]
        for row in measured
        if row["mode"] == "per_iteration" and row["ranks"] in (few, many)
    }
    largest: dict[tuple[str, str], int] = {}
    for implementation, op, payload, _ in busbw:
        if all((implementation, op, payload, ranks) in busbw for ranks in (few, many)):
            largest[implementation, op] = max(payload, largest.get((implementation, op), 0))
    ratios = [
        {
            "implementation": implementation,
            "op": op,
            "bytes": payload,
            "from_GBps": busbw[implementation, op, payload, few],
            "to_GBps": busbw[implementation, op, payload, many],
            "ratio": busbw[implementation, op, payload, many] / busbw[implementation, op, payload, few],
        }
        for (implementation, op), payload in largest.items()
    ]
    if not ratios:
        return None
    is_flat = all(abs(one["ratio"] - 1) <= FLAT for one in ratios)
    return {
        "is_flat": is_flat,
        "from_ranks": few,
        "to_ranks": many,
        "ratios": ratios,
        "sentence": _sentence(is_flat, few, many, ratios, cores),
    }


def _sentence(is_flat: bool, few: int, many: int, ratios: Sequence[dict[str, Any]], cores: int) -> str:
    parts = []
    for implementation in dict.fromkeys(one["implementation"] for one in ratios):
        own = sorted((one for one in ratios if one["implementation"] == implementation), key=lambda one: one["ratio"])
        text = f"in {implementation} it becomes {median(one['ratio'] for one in own):.2f} times what it was"
        if len(own) > 1:
            ends = " to ".join(f"{one['ratio']:.2f} {one['op']}" for one in (own[0], own[-1]))
            text += f" (median of {len(own)} ops; {ends})"
        parts.append(text)
    verdict = f"busbw is {'flat' if is_flat else 'not flat'} from {few} to {many} ranks"
    shared = f"; {many} ranks share {cores} cores" if many > cores else ""
    return f"{verdict} at the largest payload: {'; '.join(parts)}{shared}."
