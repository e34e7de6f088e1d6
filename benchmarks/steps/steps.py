"""Training steps of every strategy and implementation, and of their peers, timed in one run: `shardiff bench steps`.

`plan` says what to measure and `measure` does it. For each number of ranks there is one set of torch processes and one
of JAX processes, over the same transport and with the same threads. Within a set the contestants of a strategy take
turns step by step; the two sets take turns by blocks of iterations (`benchmarks.turns`).

The document, plain JSON; seconds, bytes; a spread is {"median", "q1", "q3"}; what was not measured is null:

    kind "steps", schema 1, complete (false in partial results), machine (`machine.facts`), method, settings
    runs     date, blocks: what was measured in which run, where an interrupted one was resumed
    rows     ranks, strategy, experts, implementation, recompute, framework, peer, product_flops (closed form, of the
             whole model), step_seconds, compute_seconds, exposed_seconds (spreads),
             exposed_share, samples_seconds[round][iteration] (slowest rank), memory {measured, closed_form} (of the
             rank with most; parameters, gradients, optimizer_state, activations, temporaries), wire_bytes (closed form,
             of a rank in a step), wire_bytes_compiled (JAX), work (JAX: `shardiff.hlo.work.Work`), loss (last),
             difference (of parameters, from the first's), gradient_difference (of gradients, before anything is timed)
             What is a formula is null for peers that are context: they do something else.
    ratios   ranks, strategy, of, to, ratio (spread), by ("iterations": of adjacent ones; "rounds": of medians)
    single_device   framework, matmul and forward_backward flops per second (spreads), share, update and copy bytes per
             second (spreads), update_share; batch
    failures sentences, empty if all contestants agree
    left_out ranks, mesh, strategy, implementation, reason: library equivalents that this torch does not have
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import turns
from benchmarks.documents import resume
from benchmarks.documents.steps import OFFLOAD
from benchmarks.problems import sizes_of, strategies_of, with_experts
from benchmarks.steps.numbers import (
    IMPLEMENTATIONS,
    METHOD,
    Samples,
    disagreements,
    key_of,
    peers_of,
    rates,
    ratios,
    rows,
)
from contract.axes import one_axis, parse_axes
from contract.problem import Problem
from contract.strategy import Run
from shardiff.system import machine

PROFILED = 5  # steps of each JAX contestant under the profiler


@dataclass(frozen=True)
class Plan:
    """runs: one for each strategy and number of ranks. implementations: of IMPLEMENTATIONS. device: cpu or cuda.
    recompute: with what else ours take part, besides what the runs say."""

    runs: tuple[Run, ...]
    implementations: tuple[str, ...]
    iterations: int
    rounds: int
    device: str
    timeout: float
    speed_batch: int
    recompute: tuple[str, ...] = ()

    def names(self, run: Run, framework: str) -> list[str]:
        """The contestants of a run in one framework."""
        expressed = run.in_gpipes_order and "ring_attention" not in run.strategies
        in_jax = ("shard_map", "annotated") if expressed else ("shard_map",)
        ours = [name for name in (("torch",) if framework == "torch" else in_jax) if name in self.implementations]
        ours += [f"{n} {how}" for n in ours for how in self.recompute if how != OFFLOAD or n == "torch"]
        return [*ours, *(peers_of(run, framework) if "peer" in self.implementations else ())]

    def contestants(self) -> list[tuple[Run, int]]:
        """(run, how many models its ranks hold at once); one on a group that sends nothing is a second model."""
        return [(run, sum(len(self.names(run, framework)) for framework in ("torch", "jax"))) for run in self.runs]


def plan(
    ranks: Sequence[int],
    strategies: Sequence[str],
    implementations: Sequence[str],
    problem: Problem,
    optimizer: str = "adamw",
    microbatches: int = 4,
    schedule: str = "gpipe",
    chunks: int = 2,
    iterations: int = 30,
    rounds: int = 3,
    device: str = "auto",
    timeout: float = 300,
    speed_batch: int = 2048,
    meshes: Sequence[str] = (),
    reshard: bool | None = None,
    recompute: Sequence[str] = ("none",),
) -> Plan:
    """Raises ValueError for what cannot be run. single_device runs on 1 rank, whatever `ranks` says.

    meshes: `dp=2,tp=2`, instead of ranks; the strategies are then those of their axes. schedule: of a pipeline; without
    strategies, one other than GPipe's is of pipeline_parallel alone. reshard: of fully_sharded, and in the same way.
    recompute: of a transformer's blocks; with several, the first is the one that the others are compared with.
    "offload" is of torch alone: what the backward pass needs waits in the host's memory.
    """
    for name, value in (("iterations", iterations), ("rounds", rounds), ("speed-batch", speed_batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if rounds > iterations:
        raise ValueError(f"{iterations} iterations cannot be split into {rounds} rounds")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
    for implementation in implementations:
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"unknown implementation {implementation!r}; known: {', '.join(IMPLEMENTATIONS)}")
    rest: dict[str, Any] = {"optimizer": optimizer, "device": device, "recompute": recompute}
    if meshes:
        if ranks:
            raise ValueError("a mesh says the number of ranks: give --mesh or --ranks, not both")
        chosen, alone = [parse_axes(mesh, tuple(strategies)) for mesh in meshes], False
    else:
        meant = [("pipeline_parallel", schedule != "gpipe"), ("fully_sharded", reshard is not None)]
        named = (
            strategies
            or [name for name, yes in meant if yes]
            or ("single_device", *(name for name in strategies_of(problem) if name != "zero2"))  # its peers are context
        )
        chosen = [one_axis(s, n) for n in ranks or (2, 4) for s in named if s != "single_device"]
        alone = "single_device" in named
    recompute = tuple(dict.fromkeys(recompute))
    if recompute[0] == OFFLOAD:
        raise ValueError("offload is compared with a step that keeps everything: --recompute none --recompute offload")
    rest["recompute"] = recompute[0]
    runs = [Run("torch", (), problem, microbatches=1, **rest)] if alone else []
    rest |= {"microbatches": microbatches, "schedule": schedule, "chunks": chunks}
    for axes in chosen:
        names = [axis.strategy for axis in axes]
        kept = reshard if "fully_sharded" in names else None
        runs.append(Run("torch", axes, with_experts(problem, names), **rest, reshard=kept))
    if reshard is not None and all(run.reshard is None for run in runs):
        raise ValueError("reshard is of fully_sharded, which is not among the strategies")
    gpus = machine.num_gpus() if device != "cpu" else 0
    most = max(run.world_size for run in runs)
    if device == "cuda" and gpus < most:
        raise ValueError(f"device cuda needs a GPU for each rank: ranks {most}, GPUs {gpus}; try --device cpu")
    for run in runs:
        for other in recompute[1:]:  # raises if it cannot be
            replace(run, recompute="selective" if other == OFFLOAD else other)
        if "peer" in implementations and run.strategies == ("pipeline_parallel",) and problem.batch % microbatches:
            raise ValueError(
                f"torch.distributed.pipelining needs microbatches of one size: batch {problem.batch}, "
                f"microbatches {microbatches}"
            )
    runs = sorted(dict.fromkeys(runs), key=lambda run: run.world_size)
    return Plan(
        tuple(runs),
        tuple(dict.fromkeys(implementations)),
        iterations,
        rounds,
        "cuda" if device != "cpu" and gpus >= most else "cpu",
        timeout,
        speed_batch,
        recompute[1:],
    )


def begin(plan: Plan) -> dict[str, Any]:
    """The document before anything is measured."""
    run = plan.runs[0]
    document: dict[str, Any] = {"kind": "steps", "schema": 1, "complete": False, "machine": machine.facts()}
    document["method"] = METHOD
    document["settings"] = {
        **sizes_of(run),
        "optimizer": run.optimizer,
        "microbatches": max(r.microbatches for r in plan.runs),
        "schedule": plan.runs[-1].schedule,
        "reshard": next((r.reshard for r in plan.runs if r.reshard is not None), None),
        "iterations": plan.iterations,
        "rounds": plan.rounds,
        "device": plan.device,
        "recomputes": list(plan.recompute),
        "speed_batch": plan.speed_batch,
        "implementations": list(plan.implementations),
        "blocks": [block(run) for run in plan.runs],
    }
    return document | {"runs": [], "rows": [], "ratios": [], "single_device": [], "failures": [], "left_out": []}


def block(run: Run) -> str:
    """What is measured together, all contestants in turn: it is kept as a whole or measured again as a whole."""
    return f"{run.strategy} on {run.mesh if len(run.axes) > 1 else f'{run.world_size} ranks'}"


def measure(
    plan: Plan,
    save: Callable[[dict[str, Any]], object] = lambda document: None,
    starting: Callable[[str], object] = lambda what: None,
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document. save: called with it whenever it has grown; kept: an interrupted run's document, whose finished
    blocks are not measured again. Raises WorkerError of either launcher, TimeoutError."""
    document = begin(plan)
    resume.begin(document, kept)
    for degree in dict.fromkeys(run.world_size for run in plan.runs):
        runs = [run for run in plan.runs if run.world_size == degree]
        rated = [run for run in runs if run.strategy == "single_device" and not getattr(run.problem, "experts", 0)]
        frameworks = [name for name in ("torch", "jax") if any(plan.names(run, name) for run in runs)]
        blocks = [*map(block, runs), *(f"{name} rates" for name in frameworks if rated)]
        starting(f"{degree} ranks: start")
        everything_kept = all(resume.has(kept, one) for one in blocks)
        with nullcontext({}) if everything_kept else sets(plan, runs) as by_framework:
            for run in runs:
                if kept and resume.has(kept, block(run)):
                    take(document, kept, run)
                    continue
                before = {key: list(document[key]) for key in ("rows", "ratios", "failures", "left_out")}
                for parts in strategy(plan, run, by_framework, starting):
                    document |= {key: before[key] + parts[key] for key in before}
                    save(document)
                resume.measured(document, block(run))
            for framework in frameworks if rated else ():
                if kept and resume.has(kept, f"{framework} rates"):
                    document["single_device"] += [r for r in kept["single_device"] if r["framework"] == framework]
                    continue
                starting(f"{framework}: share of the matrix-product rate")
                samples = max(1, plan.speed_batch // runs[0].problem.sequence)
                mine = replace(runs[0], problem=replace(runs[0].problem, batch=samples))
                mine = replace(mine, implementation="torch" if framework == "torch" else "annotated")
                taken = by_framework[framework].call("speed", mine, plan.iterations)[0]
                document["single_device"].append(rates(mine, framework, taken))
                resume.measured(document, f"{framework} rates")
                save(document)
    document["complete"] = True
    save(document)
    return document


def take(document: dict[str, Any], kept: dict[str, Any], run: Run) -> None:
    """Put what an earlier document has of a run into another."""
    for key in ("rows", "ratios", "left_out"):
        document[key] += [r for r in kept[key] if (r["strategy"], r["mesh"]) == (run.strategy, str(run.mesh))]
    document["failures"] += [one for one in kept["failures"] if f" {block(run)}:" in one]


@contextmanager
def sets(plan: Plan, runs: Sequence[Run]) -> Iterator[dict[str, turns.Ranks]]:
    """The rank processes of the frameworks that have contestants."""
    with ExitStack() as stack:
        yield {
            framework: stack.enter_context(
                turns.ranks(framework, runs[0].world_size, f"benchmarks.steps.{framework}", plan.device, plan.timeout)
            )
            for framework in ("torch", "jax")
            if any(plan.names(run, framework) for run in runs)
        }


def strategy(
    plan: Plan, run: Run, sets: dict[str, turns.Ranks], starting: Callable[[str], object]
) -> Iterator[dict[str, list[Any]]]:
    """After every block, the rows, ratios and failures of one strategy so far."""
    samples: Samples = {}
    finished: dict[str, list[dict[str, Any]]] = {}  # [name][rank]
    sets = {framework: ranks for framework, ranks in sets.items() if plan.names(run, framework)}
    proven: dict[str, float] = {}
    left_out: list[dict[str, str]] = []
    for framework, ranks in sets.items():
        names = plan.names(run, framework)
        starting(f"{run.strategy}, {run.world_size} ranks: {framework}, proof of equal gradients")
        told = ranks.call("prepare", run, names)[0]
        left_out += [{**key_of(run), "implementation": name, "reason": reason} for name, reason in told.items()]
        proofs = ranks.call("prove")
        proven |= {name: max(rank[name] for rank in proofs) for name in proofs[0]}
    for number in range(plan.rounds):
        iterations = plan.iterations // plan.rounds + (number < plan.iterations % plan.rounds)
        for framework, ranks in sets.items():
            starting(f"{run.strategy}, {run.world_size} ranks: round {number + 1} of {plan.rounds}, {framework}")
            # Both frameworks take as many steps, so that they end with the same parameters.
            blocks = ranks.call("block", iterations, 2 if number else 3)
            for name in blocks[0]:
                for kind in blocks[0][name]:
                    samples.setdefault(name, {}).setdefault(kind, []).append([rank[name][kind] for rank in blocks])
        so_far = {"rows": rows(run, samples, finished, proven), "ratios": ratios(run, samples)}
        yield so_far | {"failures": [], "left_out": left_out}
    for framework, ranks in sets.items():
        results = ranks.call("finish", *((PROFILED,) if framework == "jax" else ()))
        finished |= {name: [rank[name] for rank in results] for name in results[0]}
        done = rows(run, samples, finished, proven)
        failed = disagreements(run, done)
        yield {"rows": done, "ratios": ratios(run, samples), "failures": failed, "left_out": left_out}
