"""How much memory a command needs at least, so that sizes beyond it are refused before anything starts.

The bytes are a lower bound, so that nothing is refused that would fit. They follow the code: every process draws the
full model in float64 and keeps its shards (`contract.memory`), and contestants keep theirs while they wait for a turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from contract.memory import memory
from contract.optimizer import SLOTS
from contract.problem import BYTES, Problem
from contract.strategy import Run
from contract.transformer import Transformer
from shardiff.system.machine import num_gpus
from shardiff.system.memory import PROCESS

ARRAY = 100  # bytes of a NumPy array besides its elements
MUCH = 10**15  # bytes: more than any machine has
LONG = 10**6  # entries of lists: beyond, the closed form takes seconds


def require_processes(runs: Sequence[Run]) -> None:
    """Raises ValueError, one line, for more ranks than the launchers can start or than jax can have on a CPU."""
    from shardiff.compiling.hardware import FAMILIES
    from shardiff.ranks.torch_pool import MAX_RANKS

    for name, most in (("torch", MAX_RANKS), ("jax", FAMILIES["cpu"].most_devices)):
        ranks = max((run.world_size for run in runs if (run.implementation == "torch") == (name == "torch")), default=1)
        if ranks > most:
            raise ValueError(f"{name} runs {most} ranks at most on one machine, got {ranks}")


def full_model(problem: Problem) -> int:
    """Bytes of the full model as it is drawn, in float64."""
    shapes = [shape for layer in range(problem.unit) for shape in problem.shape(layer)]
    return problem.layers * sum(8 * prod(shape) + ARRAY for shape in shapes)


def drawn(problem: Problem) -> int:
    """Bytes that a process holds at once when it starts a run: the full model in float64 and in its own dtype, or a
    global batch."""
    return max(
        full_model(problem) * (8 + BYTES[problem.dtype]) // 8, 2 * 8 * problem.batch * problem.sequence * problem.width
    )


def held(run: Run) -> int:
    """Bytes that all ranks hold together in a training step."""
    return sum(sum(rank.to_json().values()) for rank in memory(run))


def of_run(run: Run, processes: int, copies: int = 1) -> int:
    """Bytes that a run needs in so many processes. copies: contestants, which all hold a model at once.

    The cheap bound comes first. If it exceeds any memory, the closed form, which lists all layers, is not computed.
    """
    least = processes * (PROCESS + drawn(run.problem))
    if run.device != "cpu" and num_gpus() >= run.world_size:
        return least  # the rest is on the GPUs
    if least > MUCH or run.world_size**2 * run.problem.depth > LONG:
        return least
    return max(least, processes * PROCESS + copies * held(run))


def kept_by_reference(problem: Problem) -> int:
    """Bytes of what a transformer's reference keeps for its backward pass: probabilities of attention, and slots."""
    if not isinstance(problem, Transformer):
        return 0
    tokens = problem.batch * problem.sequence
    slots = problem.top_k * problem.experts * problem.capacity if problem.experts else 0
    return 8 * problem.layers * tokens * (problem.heads * problem.sequence + slots)


def of_check(runs: Sequence[Run]) -> int:
    """Bytes of `shardiff check`: the largest run, beside the reference and its result, which is kept."""
    most = 0
    for run in runs:
        reference = full_model(run.problem) * (2 + len(SLOTS[run.optimizer])) + kept_by_reference(run.problem)
        most = max(most, reference + of_run(run, run.world_size if run.implementation == "torch" else 1))
    return most


def of_diff(runs: Sequence[Run]) -> int:
    """Bytes of `shardiff diff`: traced runs have real processes; compiled ones have shapes only."""
    from benchmarks.diff_strategies import MOST_TRACED

    return max((of_run(run, run.world_size) for run in runs if run.world_size <= MOST_TRACED), default=0)


def of_steps(runs: Sequence[tuple[Run, int]]) -> int:
    """Bytes of the largest of (run, contestants): one process per rank, and all contestants hold a model at once."""
    return max(of_run(run, run.world_size, contestants) for run, contestants in runs)
