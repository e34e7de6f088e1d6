"""What a pipeline of JAX loses, measured with the clock: a compiled program has no actions that could be watched.

All ranks run one program, and a stage computes in bubble ticks too, on values that nobody uses. So the whole program
(forward and backward pass on n stages) is timed against its useful part: a stage's own layers on all microbatches, with
the gradient of its input, as the same strategy's program on one device, run by all ranks at once. What is missing is
bubble and communication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import profile_jax
from benchmarks.barrier_jax import barrier
from benchmarks.documents.bubbles import Event
from contract.axes import one_axis
from contract.strategy import Run
from jax_impl import compose, train
from jax_impl.mesh import make_mesh

SHORTEST = 20_000  # nanoseconds; what is shorter would only blur the trace


def measure(run: Run, iterations: int, warmup: int = 2) -> tuple[list[float], list[float], list[Event], int]:
    """On every rank: seconds of the whole and of the useful part, taken in turn; events of one profiled step; bytes
    that XLA plans for what lives within a step."""
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_x64", run.problem.dtype == "float64")
    longest = -(-run.problem.layers // run.world_size)
    stage = replace(run, axes=one_axis(run.strategy, 1), problem=replace(run.problem, layers=longest), schedule="gpipe")
    whole, hlo, temporaries = program(run, jax.devices()[: run.world_size])
    useful, _, _ = program(stage, jax.local_devices(), of_input=True)
    ready = barrier(jax.devices()[: run.world_size])
    taken: dict[Callable[[], Any], list[float]] = {whole: [], useful: []}
    for iteration in range(warmup + iterations):
        for act in (whole, useful):
            ready()
            start = time.perf_counter()
            act()
            if iteration >= warmup:
                taken[act].append(time.perf_counter() - start)
    ready()
    _, _, ops = profile_jax.profile(whole, hlo, 1)[0]
    return taken[whole], taken[useful], events(ops, jax.process_index()), temporaries


def program(run: Run, devices: list[Any], of_input: bool = False) -> tuple[Callable[[], Any], str, int]:
    """Forward and backward pass, compiled and waited for; its HLO; bytes of its temporaries.

    of_input: with the gradient of the input.
    """
    mesh = make_mesh(run, devices)
    params, batch = train.make_params(mesh, run), train.make_batch(mesh, run, 0)

    def passes(params: Any, batch: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return compose.loss(params, batch._replace(x=x), mesh, run)

        if of_input:
            return jax.value_and_grad(loss, argnums=(0, 1))(params, batch.x)
        return compose.loss_and_grads(params, batch, mesh, run)

    of_params = jax.tree.map(lambda p: p.sharding, params)
    of_grads = (of_params, batch.x.sharding) if of_input else of_params
    compiled = jax.jit(passes, out_shardings=(NamedSharding(mesh, P()), of_grads)).lower(params, batch).compile()
    plan = compiled.memory_analysis()
    temporaries = plan.temp_size_in_bytes if plan else 0
    return lambda: jax.block_until_ready(compiled(params, batch)), compiled.as_text() or "", temporaries


def events(ops: list[profile_jax.Operation], rank: int) -> list[Event]:
    """Operations as events, without those inside of another that the same rank runs."""
    result: list[Event] = []
    reached = 0
    for op in ops:
        if op.end - op.start >= SHORTEST and op.start >= reached:
            kind = "communication" if op.kind == "communication" else "compute"
            name = op.name if op.kind in ("communication", "other") else f"{op.kind}: {op.name}"
            result.append(Event(rank, kind, None, op.start, op.end, name))
            reached = op.end
    return result
