"""A made-up result of `make gpu`, with every kind of row."""

from __future__ import annotations

from shared_tests.bench.report_documents import MACHINE, SIZES, spread

WORDS = {"implementation": "annotated", "strategy": "data_parallel", "mesh": "dp=8", "dtype": "bfloat16"}


def part(name, status="done", reason=None, **reached):
    times = {"seconds": 1.5, "limit_seconds": 60}
    return {"name": name, "does": f"shows {name}", "status": status, **times, "reason": reason, "reached": reached}


def proof(passed=True):
    errors = {"loss_error": 1e-8, "grad_error": 1e-7, "grad_norm_error": 1e-9, "param_error": None}
    more = {"optimizer": "adamw", "steps": 2, "seconds": 0.5, "failures": [] if passed else ["loss: error 1"]}
    return {**WORDS, **errors, **more, "passed": passed}


def step(framework="torch", share=0.83):
    of = {"framework": framework, "implementation": "eager", "dtype": "bfloat16", "batch": 8, "width": 16, "layers": 4}
    spreads = {"step_seconds": spread(0.02), "passes_seconds": spread(0.018), "update_seconds": None}
    return {**of, **spreads, "flops_per_second": 6e14, "share": share, "update_share": None, "peak_bytes": 2**30}


def document(device="cuda", passed=True, failed_tests=0):
    names = ["test_a"] * failed_tests
    tests = {"passed": 30 - failed_tests, "failed": failed_tests, "skipped": 0, "failures": names}
    program = {**WORDS, "device": "NVIDIA H200", "target": "h200:8x1", "differences": ["all_reduce: 1 here, 2 for the"]}
    program |= {"wire_bytes": [8, 16], "memory": {"temp": [4, None]}, "seconds": [1.0, 2.0]}
    rate = {"framework": "torch", "dtype": "bfloat16", "flops_per_second": 7.8e14, "copy_bytes_per_second": 4.3e12}
    floor = {"framework": "torch", "op": "copy", "bytes": 2**20, "seconds": 1e-6, "bytes_per_second": 2e12}
    return {
        "kind": "gpu",
        "schema": 1,
        "complete": False,
        "machine": MACHINE,
        "gpu": {"name": "NVIDIA H200", "memory_bytes": 2**37},
        "packages": {"triton": "3.6.0", "msgspec": None},
        "settings": {"device": device, "proof": SIZES, "step": SIZES, "mocked": 8},
        "parts": [
            part("torch_alone", proofs=[proof(passed), {**proof(passed), "model": "transformer"}]),
            part("tests", tests=tests),
            part("compiled", programs=[program]),
            part("torch_steps", rates=[rate], steps=[step(), {**step(), "model": "transformer", "sequence": 2048}]),
            part("floors", floors=[floor]),
            part("one_of_many", ranks=[{**WORDS, "ranks": 8, "step_seconds": spread(0.003)}]),
            part("jax_steps", "out of time", "it was ended after 60 s"),
            part("annotated_alone", "not reached", "no time was left"),
        ],
    }
