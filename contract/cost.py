"""The closed form: what each strategy must communicate in one training step, derived from the sizes alone.

B batch, D width, L layers, n ranks, e bytes an element, m microbatches. The loss is a scalar of four bytes in float32
and bfloat16 runs, eight in float64: losses are summed in float32 at least.
"""

from __future__ import annotations

from contract.problem import BYTES, split_sizes
from contract.strategy import AXES, Run
from shardiff.record import Executions, Record, record


def communication(run: Run) -> list[Record]:
    """The records of one step of `run`. With one rank nothing is sent, and the list is empty.

    data_parallel (Li et al., 2006.15704): backward, all_reduce of every gradient, L (D^2 + D) e bytes together.
    tensor_parallel: forward, L - 1 all_gathers of B D e; backward, L - 1 reduce_scatters of the same. Not L: the loss
        is taken on the shards, and the first layer's input needs no gradient.
    megatron_tensor_parallel (Shoeybi et al., 1909.08053): forward, L / 2 all_reduces of B D e, one for each pair;
        backward, L / 2 - 1: again the first pair's input needs no gradient.
    pipeline_parallel (Huang et al., 1811.06965): for each of m microbatches and n - 1 stage boundaries, B / m D e bytes
        forward and as much backward. A tick's sends are one permute: m + n - 1 ticks each way, but no stage sends in
        the last, so m + n - 2 permutes; under annotations all of m + n - 1 (see `scanned_pipeline`).
    All but megatron_tensor_parallel, whose output is replicated, end the forward pass with an all_reduce of the loss.
    """
    if run.degree == 1:
        return []
    if run.strategy == "pipeline_parallel" and run.implementation == "annotated":
        return scanned_pipeline(run) + _loss(run)
    return {
        "single_device": lambda run: [],
        "data_parallel": lambda run: _loss(run) + _data_parallel(run),
        "tensor_parallel": lambda run: _tensor_parallel(run) + _loss(run),
        "megatron_tensor_parallel": _megatron_tensor_parallel,
        "pipeline_parallel": lambda run: _pipeline_parallel(run) + _loss(run),
    }[run.strategy](run)


def _collective(run: Run, op: str, elements: int, phase: str, detail: str, dtype: str | None = None) -> Record:
    dtype = dtype or run.problem.dtype
    n = run.degree
    return record(
        op,
        dtype,
        elements * BYTES[dtype],
        n,
        axis=AXES[run.strategy],
        groups=(tuple(range(n)),),
        phase=phase,
        detail=detail,
    )


def _loss(run: Run) -> list[Record]:
    dtype = "float64" if run.problem.dtype == "float64" else "float32"
    return [_collective(run, "all_reduce", 1, "forward", "loss", dtype)]


def _data_parallel(run: Run) -> list[Record]:
    d = run.problem.width
    return [
        _collective(run, "all_reduce", size, "backward", f"gradient of {name}{layer}")
        for layer in reversed(range(run.problem.layers))
        for name, size in (("b", d), ("w", d * d))
    ]


def _tensor_parallel(run: Run) -> list[Record]:
    size, layers = run.problem.batch * run.problem.width, range(1, run.problem.layers)
    return [_collective(run, "all_gather", size, "forward", f"input of layer {i}") for i in layers] + [
        _collective(run, "reduce_scatter", size, "backward", f"gradient of the input of layer {i}")
        for i in reversed(layers)
    ]


def _megatron_tensor_parallel(run: Run) -> list[Record]:
    size, pairs = run.problem.batch * run.problem.width, range(0, run.problem.layers, 2)
    return [_collective(run, "all_reduce", size, "forward", f"output of layer {i + 1}") for i in pairs] + [
        _collective(run, "all_reduce", size, "backward", f"gradient of the input of layer {i}")
        for i in reversed(pairs[1:])
    ]


def _permute(run: Run, rows: int, phase: str, detail: str, edges: list[tuple[int, int]], times: int = 1) -> Record:
    dtype = run.problem.dtype
    return record(
        "collective_permute",
        dtype,
        rows * run.problem.width * BYTES[dtype],
        None,
        axis="pp",
        edges=tuple(edges),
        phase=phase,
        detail=detail,
        executions=Executions(times, times),
    )


def _pipeline_parallel(run: Run) -> list[Record]:
    """One permute for each tick of each phase in which a stage sends; payload: the most rows any stage sends in it."""
    n, m = run.degree, run.microbatches
    rows = split_sizes(run.problem.batch, m)
    records = []
    for tick in range(m + n - 2):
        sending = [stage for stage in range(n - 1) if 0 <= tick - stage < m]
        most = max(rows[tick - stage] for stage in sending)
        edges = [(stage, stage + 1) for stage in sending]
        records.append(_permute(run, most, "forward", f"activations of tick {tick}", edges))
    for tick in range(m + n - 2):
        # the mirror image: stage n - 1 - s sends the gradient of its input s ticks after the last stage does
        sending = [n - 1 - s for s in range(n - 1) if 0 <= tick - s < m]
        most = max(rows[tick - (n - 1 - stage)] for stage in sending)
        edges = [(stage, stage - 1) for stage in sending]
        records.append(_permute(run, most, "backward", f"gradients of tick {tick}", edges))
    return records


def scanned_pipeline(run: Run) -> list[Record]:
    """Pipeline as one shifted buffer (GSPMD, 2105.04663, section 3.3): each of m + n - 1 ticks permutes, each way."""
    n, m = run.degree, run.microbatches
    rows, ticks = -(-run.problem.batch // m), m + n - 1
    forward = [(stage, stage + 1) for stage in range(n - 1)]
    backward = [(b, a) for a, b in forward]
    return [
        _permute(run, rows, "forward", "activations of every tick", forward, ticks),
        _permute(run, rows, "backward", "gradients of every tick", backward, ticks),
    ]
