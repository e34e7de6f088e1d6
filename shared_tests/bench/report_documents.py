"""Made-up results for the tests of `shardiff report`: a small one for each section, with every kind of row."""

from __future__ import annotations

from benchmarks import diff_strategies as diffing
from contract import cost
from contract.axes import one_axis
from contract.problem import Problem
from contract.strategy import Run

MACHINE = {
    "os": "Linux-1.2",
    "cpu": "Example CPU",
    "cores": 4,
    "memory_bytes": 2**34,
    "gpus": [],
    "python": "3.11.0",
    "versions": {
        "numpy": "2.0",
        "torch": "2.11.1",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "flax": "0.12",
        "optax": "0.2",
    },
    "commit": "abcdef0123456789",
    "date": "2026-01-02T03:04:05+00:00",
}
SIZES = {"batch": 8, "width": 16, "layers": 4, "dtype": "float32"}


def spread(median, width=0.1):
    return {"median": median, "q1": median * (1 - width), "q3": median * (1 + width)}


def checked():
    fields = {"dtype": "float32", "optimizer": "adamw", "steps": 3, "passed": True, "mesh": "dp=2"}
    errors = {"loss_error": 1e-8, "grad_error": 7.3e-7, "grad_norm_error": 1e-9, "param_error": None}
    rows = [
        {"implementation": name, "strategy": "data_parallel", **fields, **errors} for name in ("torch", "annotated")
    ]
    return {"kind": "check", "schema": 1, "machine": MACHINE, "settings": {"device": "cpu"}, "rows": rows}


def diffed():
    found = []
    for strategy, target in (("data_parallel", "cpu:2"), ("tensor_parallel", "cpu:2"), ("tensor_parallel", "h100:2")):
        run = Run("annotated", one_axis(strategy, 2), Problem(8, 16, 4))
        records = cost.communication(Run("torch", one_axis(strategy, 2), Problem(8, 16, 4)))
        derived = records[:-1] if target == "h100:2" else records
        found.append(diffing.compare(run, target, records, derived, memory={"arguments": 4096}).to_json())
    skipped = [{"target": "v5e:2x2", "reason": "its compiler refused"}]
    settings = {**SIZES, "microbatches": 4, "device": "cpu"}
    return {"kind": "diff", "schema": 1, "machine": MACHINE, "settings": settings, "diffs": found, "skipped": skipped}


def timed():
    rows, fits = [], []
    for name in ("torch", "jax"):
        for op in ("all_reduce", "permute"):
            for ranks in (2, 4):
                of = {"implementation": name, "op": op, "ranks": ranks}
                fit = {"alpha_s": 1e-5, "beta_GBps": 2.0, "bus_beta_GBps": 2.0, "relative_error": 0.01}
                for mode in ("per_iteration", "amortized"):
                    fits.append({**of, "mode": mode, **fit, "beta_GBps": None if op == "permute" else 2.0})
                    for size in (1024, 4096, 16384):
                        seconds = {"min_s": 9e-6, "median_s": 1e-5, "p99_s": 2e-5}
                        seconds |= {"rank_min_s": 9e-6, "rank_mean_s": 1e-5, "rank_max_s": 2e-5}
                        rates = {"algbw_GBps": size / 1e4, "busbw_GBps": size / 1e4}
                        more = {"runs_as": "all_reduce", "iterations": 5, "correct": True}
                        rows.append({**of, "bytes": size, "mode": mode, **seconds, **rates, **more})
    settings = {"ranks": [2, 4], "iterations": 20, "budget": 1.0, "transport": "gloo over loopback", "device": "cpu"}
    return {
        "kind": "collectives",
        "complete": True,
        "machine": MACHINE,
        "method": ["One process per rank."],
        "settings": {**settings, "threads_per_rank": {"2": 2, "4": 1}},
        "floor": {"bytes": 1024, "memory_copy_GBps": 12.5, "loopback_GBps": {"2": 3.0, "4": 1.5}},
        "rows": rows,
        "fits": fits,
        "identities": [
            {"implementation": "torch", "ranks": 2, "identity": "a = b", "max_difference": 0, "holds": True}
        ],
        "flat": {"is_flat": True, "sentence": "busbw is flat from 2 to 4 ranks."},
    }


def stepped():
    held = {"parameters": 4000, "gradients": 4000, "optimizer_state": 8000, "activations": 512, "temporaries": None}
    rows = []
    for name, peer, seconds in (("torch", False, 0.0123), ("ddp", True, 0.02), ("annotated", False, 0.01)):
        whole = {"step_seconds": spread(seconds), "compute_seconds": spread(seconds / 2)}
        whole |= {"exposed_seconds": spread(seconds / 2), "exposed_share": 0.5, "samples_seconds": [[seconds]]}
        rows.append(
            {"ranks": 2, "strategy": "data_parallel", "implementation": name, "framework": "torch", "peer": peer}
            | whole
            | {"memory": {"measured": held, "closed_form": held}, "wire_bytes": 8000, "loss": 1.0, "difference": 0.0}
        )
    pairs = (("torch", "ddp", 0.61), ("torch", "annotated", 1.23))
    ratios = [{"of": a, "to": b, "ratio": spread(r), "ranks": 2, "strategy": "data_parallel"} for a, b, r in pairs]
    rates = ("matmul_flops_per_second", "forward_backward_flops_per_second", "share", "update_share")
    rates += ("update_bytes_per_second", "copy_bytes_per_second")
    return {
        "kind": "steps",
        "schema": 1,
        "complete": True,
        "machine": MACHINE,
        "method": {"step_seconds": "after a barrier"},
        "settings": {**SIZES, "optimizer": "adamw", "microbatches": 4, "iterations": 3, "rounds": 1, "device": "cpu"},
        "rows": rows,
        "ratios": [{**ratio, "by": "iterations"} for ratio in ratios],
        "single_device": [{"framework": "torch", "batch": 8, **{rate: spread(1e9) for rate in rates}}],
        "failures": [],
    }


def piped():
    of = {"framework": "torch", "implementation": "torch", "stages": 2, "microbatches": 1}
    row = {**of, "schedule": "naive", "theory": 0.5, "measured": spread(0.52), "weighted": spread(0.5)}
    events = [[0, "forward", 0, 0, 10, ""], [1, "forward", 0, 10, 20, ""], [1, "backward", 0, 20, 40, ""]]
    events.append([0, "backward", 0, 40, 60, ""])
    return {
        "kind": "bubbles",
        "schema": 1,
        "complete": True,
        "machine": MACHINE,
        "method": {"torch": "idle over total stage-time"},
        "settings": {**SIZES, "iterations": 3, "device": "cpu"},
        "skipped": [],
        "rows": [{**row, "of_theory": 1.04, "step_seconds": spread(0.03)}],
        "fits": [
            {"implementation": "torch", "stages": 2, "work_seconds": 0.02, "tick_seconds": 0.0, "worst_residual": 0.01}
        ],
        "timelines": [{**of, "events": events}],
    }


def everything():
    return {"check": checked(), "diff": diffed(), "collectives": timed(), "steps": stepped(), "bubbles": piped()}
