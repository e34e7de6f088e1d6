"""Expert parallel with more and less popular experts: `shardiff bench experts`.

A router that prefers some experts sends them more tokens than others. Ours gives every expert a fixed number of slots:
with as many as the most popular one needs, nothing is dropped, and all experts compute on as many. The library
equivalent sends the tokens that there are, and then waits for the rank that has most. A capacity that stays as it is
costs no time, but drops tokens.

The document, plain JSON; seconds; a spread is {"median", "q1", "q3"}:

    kind "experts", schema 1, complete, machine, method, settings
    rows     ranks, skew, busiest_expert and busiest_rank (tokens over the mean of all), capacity and capacity_factor
             (with which nothing is dropped), dropped (share of choices at capacity factor 1), slots (of the passes'
             products, over those of capacity factor 1), difference (of gradients), contestants {name: seconds, a
             spread}, over_even {name: spread}: adjacent passes over those of the same contestant with the first skew
    failures sentences, empty if both compute the same gradients
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.documents.figures import adjacent_ratios, over_ranks, spread
from benchmarks.experts.skewed import SPARSE
from benchmarks.pools import workers
from benchmarks.problems import sizes_of
from benchmarks.steps.numbers import GRADIENTS
from contract.axes import one_axis
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.system import machine

METHOD = {
    "seconds": "forward and backward pass, after a barrier, the slowest rank of each iteration; all skews and "
    "contestants take turns. The parameters are not updated, so every pass routes the same tokens",
    "skew": "expert e is chosen about as often as (1 + e)^-skew says, by a feature that is the same in all inputs and "
    "that the routers weigh differently",
    "capacity": "tokens of a sequence that an expert takes at most, such that nothing is dropped in any block",
}


@dataclass(frozen=True)
class Plan:
    """What to measure: the problem, with the capacity factor 1, at each skew and number of ranks."""

    problem: Transformer
    ranks: tuple[int, ...]
    skews: tuple[float, ...]
    iterations: int
    device: str
    timeout: float


def plan(
    problem: Any,
    ranks: Sequence[int],
    skews: Sequence[float],
    iterations: int = 12,
    device: str = "auto",
    timeout: float = 30.0,
) -> Plan:
    """Raises ValueError, one line, for what cannot be run."""
    if not isinstance(problem, Transformer) or not problem.experts:
        raise ValueError("experts are of a transformer: give --model transformer and --experts N")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    for skew in skews:
        if not 0 <= skew <= 4:
            raise ValueError(f"a skew is from 0, all experts alike, to 4, got {skew:g}")
    problem = replace(problem, capacity_factor=1.0)
    for n in ranks:
        Run("torch", one_axis("expert_parallel", n), problem, microbatches=1, device=device)
    gpus = machine.num_gpus() if device != "cpu" else 0
    if device == "cuda" and gpus < max(ranks):
        raise ValueError(f"device cuda needs a GPU for each rank: ranks {max(ranks)}, GPUs {gpus}; try --device cpu")
    on = "cuda" if gpus >= max(ranks) else "cpu"
    return Plan(problem, tuple(dict.fromkeys(ranks)), tuple(dict.fromkeys(skews)), iterations, on, timeout)


def begin(plan: Plan) -> dict[str, Any]:
    """The document before anything is measured."""
    run = Run("torch", (), plan.problem, microbatches=1)
    settings = {**sizes_of(run), "iterations": plan.iterations, "device": plan.device}
    document: dict[str, Any] = {"kind": "experts", "schema": 1, "complete": False, "machine": machine.facts()}
    document |= {"method": METHOD, "settings": settings, "runs": [], "rows": [], "failures": []}
    return document


def measure(
    plan: Plan,
    save: Callable[[dict[str, Any]], object] = lambda document: None,
    starting: Callable[[str], object] = lambda what: None,
) -> dict[str, Any]:
    """The document. Raises WorkerError if a rank fails."""
    document = begin(plan)
    for n in plan.ranks:
        starting(f"expert_parallel, {n} ranks")
        with workers("torch", n, plan.device, plan.timeout) as pool:
            told = pool.call(on_torch, plan.problem, list(plan.skews), n, plan.iterations)
        found = rows(plan, n, told)
        document["rows"] += found
        limit = GRADIENTS[plan.problem.dtype]
        document["failures"] += [
            f"{n} ranks, skew {row['skew']:g}: the gradients of {SPARSE} differ by {row['difference']:.1e}"
            for row in found
            if not row["difference"] <= limit
        ]
        save(document)
    document["complete"] = True
    save(document)
    return document


def on_torch(device: Any, *args: Any) -> list[dict[str, Any]]:
    """What a rank runs; torch is imported there alone."""
    from benchmarks.experts import torch

    return torch.measured(device, *args)


def rows(plan: Plan, ranks: int, told: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each skew from what every rank tells."""
    result, problem = [], plan.problem
    steps = [
        {name: over_ranks([rank[i]["seconds"][name] for rank in told]) for name in told[0][i]["seconds"]}
        for i in range(len(plan.skews))
    ]
    for i, skew in enumerate(plan.skews):
        loads = {key: value for key, value in told[0][i].items() if key not in ("seconds", "difference")}
        result.append(
            {
                "ranks": ranks,
                "skew": skew,
                **loads,
                "capacity_factor": loads["capacity"] * problem.experts / (problem.top_k * problem.sequence),
                "slots": loads["capacity"] / problem.capacity,
                "difference": max(rank[i]["difference"] for rank in told),
                "contestants": {name: spread(taken) for name, taken in steps[i].items()},
                "over_even": {name: spread(adjacent_ratios(taken, steps[0][name])) for name, taken in steps[i].items()},
            }
        )
    return result
