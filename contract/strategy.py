"""What to run, what a run returns, and the names that a strategy module has in every implementation.

A strategy is a module about one axis of a mesh. A run has axes as data, outermost first, each with its strategy: one
strategy is the case of one axis, and `single_device` is the case of none. A strategy has the same names in the same
order in every implementation, so that a diff of two files shows only how they communicate. It omits a name where it
changes nothing:

    AXIS                            the mesh axis that it uses
    split_params(params, mesh)      cuts the parameters that it is given; the innermost strategy cuts first
    split_batch(batch, mesh)        cuts the batch that it is given; the innermost strategy cuts first
    weights(layer, mesh)            a layer as it is used, made from the shards that a rank holds; the outermost first
    gradients(layer, mesh)          a layer's gradients as they are held, made from this rank's part of their sum
    own(layer, mesh)                what this rank updates of a layer's parameters or gradients
    whole(layer, mesh)              a layer's parameters, made from what every rank has updated
    forward(params, x, mesh)        what the layers compute, for a strategy that cuts inside a layer of the MLP
    enter(x, mesh)                  in a block of a transformer: the normalized input of a layer
    leave(y, mesh)                  the output of a layer, before it is added to the residual stream
    attend(q, k, v, local, mesh)    attention; local: of queries to keys that are on one rank
    dispatch(h, mesh)               tokens on their way to the experts
    combine(h, mesh)                what the experts make of them, on its way back
    execute(...)                    the order of execution, for a strategy that runs layers on different ranks
    total(share, mesh)              sums this axis's shares of the loss

In torch_impl these are functions that every rank runs on its shards. In jax_impl/shard_map they take no mesh, and the
two cuts are data: PARAMS_SPEC (or GRADS_SPEC, STATE_SPEC, where gradients or the optimizer's state are split and
parameters are not) and BATCH_SPEC; `arranged(batch, n)` first puts the global batch in the order in which ranks have
its parts, where that is not the usual one. In jax_impl/annotated a strategy is RULES (GRADS_RULES, STATE_RULES), and
ACTIVATIONS says that they hold for activations too (NAIVE: which ones in the naive spelling).

What `compose.py` must know beyond that stands next to AXIS, each with its reason: REPLICATED (parameters are whole on
every rank, so their gradients can be summed in buckets), GATHERS (layers can be gathered ahead), STACKED (of JAX's
pipelines: the layers of all stages are one array), FUSED (q, k and v are one product). `kept` is the policy of
`jax.checkpoint` where a layer is gathered again.

`compose.py` of each framework makes one training step of several strategies. Innermost is who cuts nearest to the
computation (`DEPTH` in contract.strategies); among equals, the inner axis of the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from contract import strategies
from contract.axes import ALL_AXES, ON_AXES, Axes, one_axis
from contract.optimizer import OPTIMIZERS
from contract.problem import DTYPES, Problem
from contract.schedule import unfit
from contract.share import Asked, length, whole_parts
from contract.transformer import Transformer
from shardiff.mesh import MOST_RANKS, Mesh

IMPLEMENTATIONS = ("torch", "shard_map", "annotated")
SPELLINGS = ("best", "naive")
SPELT = frozenset(("fully_sharded", "megatron_tensor_parallel", "sequence_parallel", "expert_parallel"))  # in two ways
RECOMPUTE = ("none", "block", "selective")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Run:
    """One training run: `steps` steps on `problem`, over the ranks of `axes`.

    microbatches, schedule: for pipeline_parallel (`contract.schedule`). chunks: of every stage, for the schedules that
    have several. overlap: in torch; if False, parameters are gathered, and gradients summed, one by one and at once,
    instead of in buckets that overlap with the passes. reshard: for fully_sharded; whether a layer is freed after the
    forward pass and gathered again for the backward pass. None: it is, unless a pipeline needs the layers for every
    microbatch. spelling: in annotated; "naive" states how the parameters are split and no activations but NAIVE of the
    strategies in `jax_impl.annotated`, and multiplies by q, k and v one by one; "best" is what a strategy's page says.
    device: "cpu", "cuda", or "auto" (CUDA where there are as many GPUs as ranks). recompute: of a transformer's blocks,
    what is computed again in the backward pass instead of stored: "none", "block", all but a block's input, or
    "selective", the attention of queries to keys (Korthikanti et al., 2205.05198).
    Raises ValueError with one line if the run cannot work.
    """

    implementation: str = "torch"
    axes: Axes = field(default_factory=lambda: one_axis("data_parallel", 4))
    problem: Problem = field(default_factory=Problem)
    optimizer: str = "adamw"
    steps: int = 3
    microbatches: int = 4
    overlap: bool = True
    reshard: bool | None = None
    spelling: str = "best"
    device: str = "auto"
    schedule: str = "gpipe"
    chunks: int = 2
    recompute: str = "none"

    def __post_init__(self) -> None:
        if problem := impossible(self):
            raise ValueError(problem)

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks on their axes. It prints as the tables show it: `dp=2,tp=4`, and `1` for a single device."""
        return Mesh(tuple((axis.name, axis.size) for axis in self.axes))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.size

    @cached_property
    def strategies(self) -> tuple[str, ...]:
        """The strategies of the axes, outermost first."""
        return tuple(axis.strategy for axis in self.axes)

    @cached_property
    def nested(self) -> Axes:
        """The axes in the order in which strategies nest: the last one cuts first, and the others cut its parts.

        A layer must be put together again before a rank computes with it, and copies are summed in shards. So who
        computes on shards cuts before who only stores shards, whatever the places of their axes in the mesh.
        """
        return tuple(sorted(self.axes, key=lambda axis: strategies.of(axis.strategy).DEPTH))

    @property
    def cutting_the_batch(self) -> Axes:
        """The axes in the order in which they cut the batch: as strategies nest, but `cp` first.

        It splits the sequence inside the layers, and sequence_parallel what it leaves.
        """
        return tuple(sorted(reversed(self.nested), key=lambda axis: axis.name != "cp"))

    @property
    def state_is_split(self) -> bool:
        """Whether replicas of a rank's computation update different parts of the parameters (ZeRO)."""
        return any(strategies.of(name).DEPTH == 1 for name in self.strategies)

    @property
    def gathered_again(self) -> bool:
        """Whether layers are gathered before use, and again for the backward pass."""
        gathers = any(map(strategies.gathers, self.strategies))
        return gathers and ("pipeline_parallel" not in self.strategies if self.reshard is None else self.reshard)

    @property
    def strategy(self) -> str:
        """The names of the strategies joined, for tables and messages: `data_parallel x tensor_parallel`."""
        return " x ".join(self.strategies) or "single_device"

    @property
    def in_gpipes_order(self) -> bool:
        """Whether a pipeline runs in GPipe's order, which JAX's transpose of the forward program gives."""
        return self.schedule == "gpipe" or (self.schedule == "naive" and self.microbatches == 1)

    @property
    def on_one_device(self) -> Run:
        """The same training on a single device, which a run must equal."""
        plain: dict[str, Any] = {"schedule": "gpipe", "chunks": 2, "overlap": True, "reshard": None, "spelling": "best"}
        plain["recompute"] = "none"
        return replace(self, axes=(), microbatches=1, **plain)

    @property
    def in_torch(self) -> Run:
        """The same training in torch, where every collective is written and there is one spelling."""
        return replace(self, implementation="torch", spelling="best")

    def size_of(self, axis: str) -> int:
        """The number of ranks along an axis; 1 if the run does not have it."""
        return dict(self.mesh.axes).get(axis, 1)

    def size(self, strategy: str) -> int:
        """The number of ranks along the axis of this strategy; 1 if the run does not use it."""
        return next((axis.size for axis in self.axes if axis.strategy == strategy), 1)


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
    """What a run returns, as full NumPy arrays (bfloat16 is widened to float32, which holds it exactly).

    losses[steps]; grads: of the first step; grad_norms[steps]; params and optimizer_state (slot -> shaped as params):
    after the last step; shards[rank]: parameter name ("w0", "b0", ...) -> Shard. The reference leaves shards empty.
    """

    losses: np.ndarray
    grads: list[Any]
    grad_norms: np.ndarray
    params: list[Any]
    optimizer_state: dict[str, list[Any]]
    shards: list[dict[str, Shard]] = field(default_factory=list)


def impossible(run: Run) -> str | None:
    """Why a run cannot work, in one line with the numbers and with what would be right; None if it can."""
    for name, value, known in (
        ("implementation", run.implementation, IMPLEMENTATIONS),
        *(("strategy", axis.strategy, ON_AXES) for axis in run.axes),
        ("dtype", run.problem.dtype, DTYPES),
        ("optimizer", run.optimizer, OPTIMIZERS),
        ("spelling", run.spelling, SPELLINGS),
        ("device", run.device, DEVICES),
        ("recompute", run.recompute, RECOMPUTE),
    ):
        if value not in known:
            return f"unknown {name} {value!r}; known: {', '.join(known)}"
    problem = run.problem
    for name, value in (
        *(("degree" if len(run.axes) == 1 else f"axis {axis.name}", axis.size) for axis in run.axes),
        ("batch", problem.batch),
        ("width", problem.width),
        ("layers", problem.layers),
        ("steps", run.steps),
        ("microbatches", run.microbatches),
        ("chunks", run.chunks),
    ):
        if value < 1:
            return f"{name} must be at least 1, got {value}"
    for axis in run.axes:
        if axis.size > MOST_RANKS:  # beyond, lists of all ranks take seconds, and gigabytes
            return f"{axis.strategy} runs on at most {MOST_RANKS:,} ranks, got {axis.size:,}"
    if problem.seed < 0:
        return f"seed must be at least 0, got {problem.seed}"
    if flaw := problem.flaw():
        return flaw
    names = [axis.name for axis in run.axes]
    for axis in run.axes:
        if names.count(axis.name) > 1:
            return f"axis {axis.name} is named twice in the mesh"
        if ALL_AXES[axis.strategy] != axis.name:
            return f"{axis.strategy} uses the axis {ALL_AXES[axis.strategy]}, not {axis.name}"
    if run.spelling == "naive" and (run.implementation != "annotated" or not SPELT.intersection(run.strategies)):
        return f"only {', '.join(sorted(SPELT))} have a naive spelling, and only under annotations"
    if run.spelling == "naive" and problem.unit == 1 and "fully_sharded" not in run.strategies:
        return f"{run.strategy} has a naive spelling of a transformer's blocks, and the problem is an MLP"
    if run.reshard and "pipeline_parallel" in run.strategies:
        return "a pipeline gathers its layers once for all microbatches and keeps them: reshard must be false"
    if flaw := unfit(run.schedule, run.size("pipeline_parallel"), run.microbatches, run.chunks):
        return flaw
    if run.schedule != "gpipe" and "pipeline_parallel" not in run.strategies:
        return f"the schedule {run.schedule} needs an axis pp; {run.strategy} has no pipeline"
    if run.implementation == "annotated" and not run.in_gpipes_order:
        return f"annotated can express GPipe's order only, not the schedule {run.schedule}; use torch or shard_map"
    if run.implementation == "annotated" and "ring_attention" in run.strategies:
        return "no annotation derives a ring: what XLA makes of a split sequence is context_parallel"
    if run.recompute != "none" and not isinstance(problem, Transformer):
        return "an MLP stores what its backward pass needs: recompute is for a transformer's blocks"
    if run.recompute == "block" and run.schedule in ("zb_h1", "zb_v"):
        return f"the schedule {run.schedule} would run a block again for the gradient of each of its weights; use 1f1b"
    rows, unit = problem.batch, max(problem.unit, *(strategies.of(axis.strategy).UNIT for axis in run.axes), 1)
    for axis in run.axes:
        rows = min(strategies.of(axis.strategy).rows(rows, axis.size))
    return refusal(run.nested, problem, run.microbatches, rows, unit, run.schedule, run.chunks)


@lru_cache(4096)
def refusal(
    nested: Axes, problem: Problem, microbatches: int, rows: int, unit: int, schedule: str, chunks: int
) -> str | None:
    """Why a strategy cannot cut what the deeper ones leave, in one line; None if all of them can."""
    sizes, parts = {axis.name: axis.size for axis in nested}, list(whole_parts(problem, 2))  # every kind of layer
    for axis in reversed(nested):
        strategy = strategies.of(axis.strategy)
        sequence = problem.sequence // (sizes.get("cp", 1) if axis.name != "cp" else 1)
        heads = problem.heads // sizes.get("tp", 1) if isinstance(problem, Transformer) else 1
        pairs = [pair for part in parts for pair in zip(part.cuts, problem.shape(part.layer), strict=True)]
        heights = frozenset(length(cut[0], shape[0]) for cut, shape in pairs)
        asked = Asked(problem, microbatches, rows, unit, heights, schedule, chunks, sequence, heads)
        if flaw := strategy.refusal(asked, axis.size):
            return flaw
        parts = strategy.cut(parts, problem, axis.size, 0, unit)
    return None
