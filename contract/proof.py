"""What counts as equal: how far a run is from the reference, how far it may be, and what else must hold of it.

The limit depends on the run's dtype. float64 has a fixed limit, and so has float32 as long as rounding alone stays
below it, which hundreds of steps need not. bfloat16 rounds so coarsely that a fixed
limit would either reject correct runs or accept wrong ones, so the limit is twice the error that the same framework
makes in bfloat16 on a single device, where nothing is communicated. A single-device run that has gone wrong altogether
does not excuse another run: the limit has an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contract.layout import layout
from contract.share import names
from contract.strategy import Run, RunResult

LIMITS = {"float64": 1e-12, "float32": 1e-5}
BFLOAT16_ROUNDOFF = 2.0**-8  # 8 bits of significand: two correct bfloat16 scalars may differ by this much
FLOAT32_MOST = 1e-3  # the most that rounding of a single device excuses: after 1,000 steps of AdamW it is off by 3e-5
BFLOAT16_MOST = 0.5  # rounding alone stays below: after 200 steps of AdamW the second moment is off by 0.24
CLAIMS = ("loss", "gradients", "gradient norm", "parameters", "optimizer state")
SCALARS = ("loss", "gradient norm")


@dataclass(frozen=True)
class Proof:
    """errors: claim -> error, for every one of CLAIMS. failures: one line for each thing that does not hold."""

    errors: dict[str, float]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures


def prove(run: Run, got: RunResult, want: RunResult, own: RunResult | None = None) -> Proof:
    """Compare `got` with the reference's result `want`.

    own: the same framework's single-device run; needed for bfloat16, and may raise a limit for float32.
    """
    errors = distances(got, want)
    bounds = limits(run.problem.dtype, distances(own, want) if own else None)
    failures = wrong_shards(run, got) + differing_replicas(run, got)
    for claim, distance in errors.items():
        if not distance <= bounds[claim]:  # so that NaN fails
            where = worst(got, want, claim)
            failures.append(f"{claim}: error {distance:.2g}, at most {bounds[claim]:.2g} allowed; largest in {where}")
    return Proof(errors, tuple(failures))


def error(got: Sequence[Any], want: Sequence[Any]) -> float:
    """||got - want|| / ||want|| in float64, with all layers taken as one vector.

    It is infinite where the shapes differ, or where want is zero and got is not. It is NaN or infinite where got is.
    """
    if len(got) != len(want):
        return math.inf
    return _error([pair for g, w in zip(got, want, strict=True) for pair in zip(g, w, strict=True)])


def scalar_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest |got - want| / |want| over the steps; infinite if the number of steps differs."""
    if np.shape(got) != np.shape(want):
        return math.inf
    steps = zip(got.tolist(), want.tolist(), strict=True)
    return float(np.max([_ratio(abs(g - w), abs(w)) for g, w in steps]))  # np.max keeps NaN, max need not


def distances(got: RunResult, want: RunResult) -> dict[str, float]:
    """Claim -> error. The optimizer's state counts with its worst slot, so that no slot hides another."""
    slots = [error(got.optimizer_state.get(slot, []), layers) for slot, layers in want.optimizer_state.items()]
    return {
        "loss": scalar_error(got.losses, want.losses),
        "gradients": error(got.grads, want.grads),
        "gradient norm": scalar_error(got.grad_norms, want.grad_norms),
        "parameters": error(got.params, want.params),
        "optimizer state": float(np.max(slots)),
    }


def limits(dtype: str, own: Mapping[str, float] | None = None) -> dict[str, float]:
    """Claim -> the largest error allowed. own: the errors of the single-device run, needed for bfloat16.

    float32: LIMITS, or twice the single-device run's own errors where that is larger, as after hundreds of steps; at
    most FLOAT32_MOST. bfloat16: twice the single-device run's own errors, at most BFLOAT16_MOST; a scalar's own error
    can be almost zero by luck, so its limit is never less than one unit roundoff. Where the single-device run's error
    is NaN the limit is NaN, which no error meets.
    """
    if dtype == "float32" and own is not None:
        return {claim: float(np.clip(2 * own[claim], LIMITS[dtype], FLOAT32_MOST)) for claim in CLAIMS}  # keeps NaN
    if dtype != "bfloat16":
        return dict.fromkeys(CLAIMS, LIMITS[dtype])
    if own is None:
        raise ValueError("a bfloat16 run is judged by the error of a single-device bfloat16 run: pass its errors")
    twice = {c: 2 * np.maximum(own[c], BFLOAT16_ROUNDOFF / 2 if c in SCALARS else 0) for c in CLAIMS}  # keeps NaN
    return {claim: float(np.minimum(limit, BFLOAT16_MOST)) for claim, limit in twice.items()}


def worst(got: RunResult, want: RunResult, claim: str) -> str:
    """Where a claim is furthest off: the name of the tensor, or for a scalar the step."""
    if claim in SCALARS:
        g, w = (got.losses, want.losses) if claim == "loss" else (got.grad_norms, want.grad_norms)
        if np.shape(g) != np.shape(w):
            return f"the number of steps, {len(g)} instead of {len(w)}"
        return f"step {np.argmax([scalar_error(g[i : i + 1], w[i : i + 1]) for i in range(len(w))])}"
    groups = {
        "gradients": {"": (got.grads, want.grads)},
        "parameters": {"": (got.params, want.params)},
        "optimizer state": {f"{s} of ": (got.optimizer_state.get(s, []), v) for s, v in want.optimizer_state.items()},
    }
    tensors = {}
    for prefix, (g, w) in groups[claim].items():
        if len(g) != len(w):
            return f"{prefix}the layers, of which there are {len(g)} instead of {len(w)}"
        for layer, pair in enumerate(zip(g, w, strict=True)):
            for kind, a, b in zip(pair[1]._fields, *pair, strict=True):
                tensors[f"{prefix}{kind}{layer}"] = _error([(a, b)])
    return list(tensors)[int(np.argmax(list(tensors.values())))]  # argmax returns the first NaN, if there is one


def wrong_shards(run: Run, got: RunResult) -> list[str]:
    """Every rank must hold the parameters that the layout gives it, all of them in the run's dtype."""
    if len(got.shards) != run.world_size:
        return [f"shards: {len(got.shards)} ranks reported their shards, not {run.world_size}"]
    failures = []
    for rank, parts in enumerate(layout(run)):
        held, due = got.shards[rank], {name for part in parts for name in names(part)}
        if held.keys() != due:
            failures.append(f"shards: rank {rank} holds {' '.join(sorted(held))}, not {' '.join(sorted(due))}")
        for name, shard in held.items():
            if shard.dtype != run.problem.dtype:
                failures.append(f"dtype: {name} on rank {rank} is {shard.dtype}, not {run.problem.dtype}")
    return failures[:1]


def differing_replicas(run: Run, got: RunResult) -> list[str]:
    """Ranks that hold the same part must hold the same bits, at the start and after every step."""
    first: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}
    for rank, (parts, held) in enumerate(zip(layout(run), got.shards, strict=False)):
        for name, index in [pair for part in parts for pair in zip(names(part), part.cuts, strict=True)]:
            if name not in held:
                continue  # wrong_shards reports it
            digests = held[name].digests
            if len(digests) != run.steps + 1:
                return [f"replicas: {name} on rank {rank} has {len(digests)} digests, not {run.steps + 1}"]
            other, kept = first.setdefault((name, str(index)), (rank, digests))
            if digests != kept:
                step = [a == b for a, b in zip(digests, kept, strict=True)].index(False)
                return [f"replicas: {name} differs between ranks {other} and {rank} after {step} steps"]
    return []


def _error(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    if any(np.shape(g) != np.shape(w) for g, w in pairs):
        return math.inf
    with np.errstate(all="ignore"):  # an overflow is a valid answer: infinity
        off = math.sqrt(sum(_square(np.asarray(g, np.float64) - w) for g, w in pairs))
    return _ratio(off, math.sqrt(sum(_square(w) for _, w in pairs)))


def _square(a: np.ndarray) -> float:
    flat = np.ravel(a)
    return float(flat @ flat)


def _ratio(off: float, of: float) -> float:
    if of:
        return off / of
    return off if off == 0 or math.isnan(off) else math.inf
