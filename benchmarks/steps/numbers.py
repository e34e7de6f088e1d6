"""From what the ranks of `shardiff bench steps` took to rows, ratios and rates; `steps` describes the document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from benchmarks.documents.figures import Spread, adjacent_ratios, over_ranks, round_ratios, spread
from benchmarks.documents.steps import OFFLOAD
from benchmarks.flops import products, products_of_layers
from contract.cost import communication
from contract.memory import memory
from contract.optimizer import SLOTS
from contract.problem import BYTES
from contract.strategy import Run
from shardiff.record import Record, totals

IN_JAX = ("shard_map", "annotated", "jit")
IMPLEMENTATIONS = ("torch", "shard_map", "annotated", "peer")
TP = ("tensor_parallel", "megatron_tensor_parallel", "sequence_parallel")
PEERS = {  # strategy -> its library equivalents in torch. Axes in torch's order: another order has no equivalent
    "single_device": ("modules",),
    "data_parallel": ("ddp",),
    "pipeline_parallel": ("pipelining",),
    "fully_sharded": ("fsdp2",),
    "zero1": ("ddp_zero",),
    "data_parallel x fully_sharded": ("fsdp2",),
    "ring_attention": ("ddp_ring",),
    "expert_parallel": ("all_to_all",),
    **{tp: ("dtensor",) for tp in TP},
    **{f"data_parallel x {tp}": ("dtensor_ddp",) for tp in TP},
    **{f"fully_sharded x {tp}": ("dtensor_fsdp2",) for tp in TP},
    **{f"data_parallel x fully_sharded x {tp}": ("dtensor_fsdp2",) for tp in TP},
}
CONTEXT = {  # strategy -> what does something else but is used in its place
    "data_parallel": ("fsdp2",),
    "zero2": ("fsdp2",),
}


def peers_of(run: Run, framework: str) -> tuple[str, ...]:
    """The library equivalents of a run, and then what is there for context. A naive pipeline and recompute have none.

    JAX has one for a single device alone: on several, what a user writes is annotations, which is a side of ours.
    """
    experts = getattr(run.problem, "experts", 0)  # neither jax.nn nor DTensor has any
    if framework == "jax":
        return ("jit",) if run.strategy == "single_device" and not experts else ()
    if (run.schedule == "naive" and "pipeline_parallel" in run.strategies) or run.recompute != "none":
        return ()
    if experts and run.size_of("tp") > 1:
        return ()
    return (*PEERS.get(run.strategy, ()), *CONTEXT.get(run.strategy, ()))


def run_of(run: Run, name: str) -> Run:
    """What a contestant runs. Ours have their implementation as name, and behind it what they recompute, if that is not
    what the run says: `torch`, `shard_map block`."""
    base, _, recompute = name.partition(" ")
    if recompute != OFFLOAD:
        run = replace(run, recompute=recompute or run.recompute)
    return replace(run, implementation={"jit": "annotated"}.get(base, base if base in IN_JAX else "torch"))


def key_of(run: Run) -> dict[str, Any]:
    """What tells a run from the others of a document."""
    experts = getattr(run.problem, "experts", 0)
    return {"ranks": run.world_size, "mesh": str(run.mesh), "strategy": run.strategy, "experts": experts}


TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-2,
    "bfloat16": 1e-1,
}  # of parameters after all steps; Adam magnifies rounding
GRADIENTS = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 5e-2}  # before anything is timed, in one step
WARM_UP = 8  # of what a single device does in turn: its heap grows for as long
METHOD = {
    "step_seconds": "after a barrier, from a rank's start of the step to its end; the slowest rank of each iteration",
    "compute_seconds": "torch: the same step, in turn with the real one, on a process group whose collectives return "
    "at once (torch's fake backend). JAX: step less exposed",
    "exposed_seconds": "transfer that nothing hides, waiting for other ranks, and in a pipeline the bubble. torch: "
    "step less compute, of the same iteration; not measured (-) where that is negative, as the fake backend then does "
    "more work than the real one (DTensor). JAX: the share of profiled steps in which a collective runs on a rank "
    "and nothing computes, mean over ranks, times the step",
    "memory": "measured: bytes of live arrays, each storage once; activations: what autograd keeps at most (by its "
    "hooks); temporaries: XLA's plan. closed_form: contract.memory",
    "single_device": "the three products of each matrix of a layer, or of a block, forward and backward pass, update "
    f"and a copy in turn; share is the rate of the passes' products over that of the products alone, after {WARM_UP} "
    "of each unless fewer are timed. Ranks keep the memory that they free",
    "wire_bytes": "contract.cost, what a rank must send under the bandwidth-optimal algorithm",
}

Samples = dict[str, dict[str, list[list[list[float]]]]]  # [name][kind][round][rank][iteration]


def rows(
    run: Run, samples: Samples, finished: dict[str, list[dict[str, Any]]], proven: dict[str, float]
) -> list[dict[str, Any]]:
    """One row for each contestant; what its ranks have not told yet is null. proven: differences of gradients."""
    result = []
    for name, taken in samples.items():
        steps = [over_ranks(each) for each in taken["step"]]
        flat = [seconds for each in steps for seconds in each]
        mine, (base, _, stored) = run_of(run, name), name.partition(" ")
        framework = "torch" if mine.implementation == "torch" else "jax"
        compute = [seconds for each in taken.get("compute", []) for seconds in over_ranks(each)]
        told = finished.get(name)
        parts = split(flat, compute, told, run.world_size)
        shards = [m.to_json() for m in memory(mine)]
        context = name in CONTEXT.get(run.strategy, ())
        no_formula = context or stored == OFFLOAD
        compiled = told and told[0].get("records")
        result.append(
            {
                **key_of(run),
                "implementation": base,
                "recompute": stored or mine.recompute,
                "framework": framework,
                "peer": base not in IMPLEMENTATIONS,
                "product_flops": products(run.problem, mine.recompute),
                "step_seconds": spread(flat),
                **parts,
                "samples_seconds": steps,
                "memory": {"measured": largest(told or []), "closed_form": None if no_formula else largest(shards)},
                "wire_bytes": None if context else totals(communication(mine))["wire_bytes"]["max"],
                "wire_bytes_compiled": None
                if compiled is None
                else totals(map(Record.from_json, compiled))["wire_bytes"]["max"],
                "work": told[0].get("work") if told else None,
                "loss": told[0]["loss"] if told else None,
                "difference": max(rank["difference"] for rank in told) if told else None,
                "gradient_difference": proven.get(name),
            }
        )
    return result


def largest(ranks: Sequence[dict[str, Any]]) -> dict[str, int | None]:
    """The most that a rank holds of each kind of memory; null where none has told."""
    kinds = ("parameters", "gradients", "optimizer_state", "activations", "temporaries")
    return {kind: max((r[kind] for r in ranks if r.get(kind) is not None), default=None) for kind in kinds}


def split(
    steps: list[float], compute: list[float], told: list[dict[str, Any]] | None, degree: int
) -> dict[str, Spread | float | None]:
    """compute_seconds, exposed_seconds and exposed_share of a row; see METHOD. None: not measured."""
    if degree == 1:
        zero = {"median": 0.0, "q1": 0.0, "q3": 0.0}
        return {"compute_seconds": spread(steps), "exposed_seconds": zero, "exposed_share": 0.0}
    if compute:
        exposed = spread([a - b for a, b in zip(steps, compute, strict=True)])
        share = exposed["median"] / statistics.median(steps)
        if share < 0:  # without communication a step takes longer: it is not the same work
            return {"compute_seconds": None, "exposed_seconds": None, "exposed_share": None}
        return {"compute_seconds": spread(compute), "exposed_seconds": exposed, "exposed_share": share}
    if told and "profiled" in told[0] and all(rank["profiled"] for rank in told):
        shares = [sum(rank["exposed"]) / sum(rank["profiled"]) for rank in told]
        share = statistics.mean(shares)
        whole = spread(steps)
        return {
            "compute_seconds": {key: (1 - share) * value for key, value in whole.items()},
            "exposed_seconds": {key: share * value for key, value in whole.items()},
            "exposed_share": share,
        }
    return {"compute_seconds": None, "exposed_seconds": None, "exposed_share": None}


def ratios(run: Run, samples: Samples) -> list[dict[str, Any]]:
    """Step time over step time: within a framework of adjacent iterations, across both of each round's medians."""
    steps = {name: [over_ranks(each) for each in taken["step"]] for name, taken in samples.items()}
    peers = {framework: peers_of(run, framework) for framework in ("torch", "jax")}
    pairs = [("torch", peer, "iterations") for peer in peers["torch"]]
    pairs += [("shard_map", "annotated", "iterations")]
    pairs += [(ours, peer, "iterations") for peer in peers["jax"] for ours in ("shard_map", "annotated")]
    pairs += [("torch", "shard_map", "rounds"), ("torch", "annotated", "rounds")]
    pairs += [(name, name.partition(" ")[0], "iterations") for name in steps if " " in name]
    result = []
    for of, to, by in pairs:
        if of in steps and to in steps:
            both = zip(steps[of], steps[to], strict=False)  # a framework can be a round behind
            ours, theirs = map(list, zip(*both, strict=True))
            values = round_ratios(ours, theirs) if by == "rounds" else adjacent_ratios(sum(ours, []), sum(theirs, []))
            result.append(
                {
                    **key_of(run),
                    "of": of,
                    "to": to,
                    "ratio": spread(values),
                    "by": by,
                }
            )
    return result


def disagreements(run: Run, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Contestants that have not trained the same: other parameters within a framework, another loss across both."""
    limit, most = TOLERANCE[run.problem.dtype], GRADIENTS[run.problem.dtype]
    told = [row for row in rows if row["loss"] is not None]
    result = []
    for row in told:
        variant = f" recompute {row['recompute']}" if row.get("recompute", "none") != "none" else ""
        name = f"{row['implementation']}{variant} {run.strategy} on {run.world_size} ranks"
        if not row["gradient_difference"] <= most:
            result.append(
                f"{name}: gradients differ by {row['gradient_difference']:.1e} from {told[0]['implementation']}'s"
            )
        if not row["difference"] <= limit:
            result.append(f"{name}: parameters differ by {row['difference']:.1e} from {told[0]['implementation']}'s")
        if not abs(row["loss"] - told[0]["loss"]) <= limit * abs(told[0]["loss"]):
            first = f"{told[0]['loss']:.6g} of {told[0]['implementation']}"
            result.append(f"{name}: loss {row['loss']:.6g} where that is {first}")
    return result


def rates(run: Run, framework: str, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Rates of one device from seconds of "matmul", "forward_backward", "update" and "copy", taken in turn.

    "matmul" is the three products of each matrix of a layer, or of a block, alone; forward and backward pass take as
    many for every layer, less one in the MLP, whose first layer's input needs no gradient. (Attention of queries to
    keys takes time there and is not counted.) AdamW reads 4 arrays of the parameters' size and writes 3, SGD with
    momentum 3 and 2."""
    problem = run.problem
    forward = products_of_layers(problem)
    alone = 3 * forward // problem.layers
    passes = 3 * forward - (forward // problem.layers if problem.unit == 1 else 0)
    parameters = sum(prod(shape) for layer in problem.shapes() for shape in layer) * BYTES[problem.dtype]
    moved = parameters * (3 + 2 * len(SLOTS[run.optimizer]))
    adjacent = zip(taken["matmul"], taken["forward_backward"], strict=True)
    copies = zip(taken["copy"], taken["update"], strict=True)
    return {
        "framework": framework,
        "batch": problem.batch,
        "matmul_flops_per_second": spread([alone / s for s in taken["matmul"]]),
        "forward_backward_flops_per_second": spread([passes / s for s in taken["forward_backward"]]),
        "share": spread([passes / b / (alone / a) for a, b in adjacent]),
        "update_bytes_per_second": spread([moved / s for s in taken["update"]]),
        "copy_bytes_per_second": spread([2 * parameters / s for s in taken["copy"]]),
        "update_share": spread([moved / b / (2 * parameters / a) for a, b in copies]),
    }
