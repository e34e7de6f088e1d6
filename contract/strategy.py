"""What to run, what comes out, and the names that a strategy module has on every side.

A strategy is a module. On all three sides it has the same names in the same order, so that a diff of two files shows
only how they communicate:

    AXIS                                    the mesh axis that it uses
    split_params(params, mesh, run)         the full parameters -> this side's shards of them
    split_batch(batch, mesh, run)           the global batch -> this side's shards of it
    loss(params, batch, mesh, run)          the global loss
    loss_and_grads(params, batch, mesh, run)    the global loss, and gradients split as the parameters are

On the torch side the functions run in every rank and see that rank's shards. On the JAX side they run once and see
arrays whose shards lie on the devices of the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from contract.optimizer import OPTIMIZERS
from contract.problem import DTYPES, Batch, Layer, Problem

IMPLEMENTATIONS = ("torch", "shard_map", "annotated")
STRATEGIES = ("data_parallel", "tensor_parallel", "megatron_tensor_parallel", "pipeline_parallel")
AXES = {
    "single_device": None,
    "data_parallel": "dp",
    "tensor_parallel": "tp",
    "megatron_tensor_parallel": "tp",
    "pipeline_parallel": "pp",
}
DEVICES = ("auto", "cpu", "cuda")


class Strategy(Protocol):
    """The interface of a strategy module; see the head of this file."""

    AXIS: str | None

    def split_params(self, params: list[Layer], mesh: Any, run: Run) -> Any: ...

    def split_batch(self, batch: Batch, mesh: Any, run: Run) -> Batch: ...

    def loss(self, params: Any, batch: Batch, mesh: Any, run: Run) -> Any: ...

    def loss_and_grads(self, params: Any, batch: Batch, mesh: Any, run: Run) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class Run:
    """One training run: strategy `strategy` over `degree` ranks, `steps` steps on `problem`.

    microbatches: pipeline_parallel only. overlap: data_parallel in torch only; False all-reduces each gradient after
    the backward pass instead of in buckets during it. device: "cpu", "cuda", or "auto" (CUDA where there are as many
    GPUs as ranks).
    """

    implementation: str = "torch"
    strategy: str = "data_parallel"
    degree: int = 4
    problem: Problem = field(default_factory=Problem)
    optimizer: str = "adamw"
    steps: int = 3
    microbatches: int = 4
    overlap: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        if problem := impossible(self):
            raise ValueError(problem)

    @property
    def mesh(self) -> str:
        """The mesh as the tables print it: `tp=4`."""
        return f"{AXES[self.strategy]}={self.degree}" if AXES[self.strategy] else "1"


@dataclass(frozen=True)
class Shard:
    """One parameter as one rank holds it: its shape, dtype and bytes, and a digest of its value after every step.

    digests[k] is taken after k steps, so digests[0] is that of the initial value. Equal digests mean equal bits.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    digests: tuple[str, ...] = ()


@dataclass
class RunResult:
    """What a run gives, as full NumPy arrays (bfloat16 is widened to float32, which holds it exactly).

    losses[steps]; grads: of the first step; grad_norms[steps]; params and optimizer_state (slot -> as params): after
    the last step; shards[rank]: parameter name ("w0", "b0", ...) -> Shard. The reference leaves shards empty.
    """

    losses: np.ndarray
    grads: list[Layer]
    grad_norms: np.ndarray
    params: list[Layer]
    optimizer_state: dict[str, list[Layer]]
    shards: list[dict[str, Shard]] = field(default_factory=list)


def impossible(run: Run) -> str | None:
    """Why a run cannot work, in one line with the numbers and what would be right; None if it can."""
    for name, value, known in (
        ("implementation", run.implementation, IMPLEMENTATIONS),
        ("strategy", run.strategy, tuple(AXES)),
        ("dtype", run.problem.dtype, DTYPES),
        ("optimizer", run.optimizer, OPTIMIZERS),
        ("device", run.device, DEVICES),
    ):
        if value not in known:
            return f"unknown {name} {value!r}; known: {', '.join(known)}"
    problem, n = run.problem, run.degree
    for name, value in (
        ("degree", n),
        ("batch", problem.batch),
        ("width", problem.width),
        ("layers", problem.layers),
        ("steps", run.steps),
        ("microbatches", run.microbatches),
    ):
        if value < 1:
            return f"{name} must be at least 1, got {value}"
    if problem.seed < 0:
        return f"seed must be at least 0, got {problem.seed}"
    if run.strategy == "single_device" and n != 1:
        return f"single_device runs on 1 rank, got degree {n}"
    if run.strategy == "data_parallel" and problem.batch < n:
        return f"data_parallel over {n} ranks needs a batch of at least {n}, got {problem.batch}"
    if AXES[run.strategy] == "tp" and problem.width % n:
        return f"{run.strategy} needs a width divisible by its degree: width {problem.width}, degree {n}"
    if run.strategy == "megatron_tensor_parallel" and problem.layers % 2:
        return f"megatron_tensor_parallel splits layers in pairs and needs an even number, got {problem.layers}"
    if run.strategy == "pipeline_parallel":
        if problem.layers < n:
            return f"pipeline_parallel over {n} stages needs at least {n} layers, got {problem.layers}"
        if run.microbatches > problem.batch:
            return f"{run.microbatches} microbatches need a batch of at least {run.microbatches}, got {problem.batch}"
    return None
