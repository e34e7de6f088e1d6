"""The closed form of memory: what each rank holds during a training step, derived from the sizes alone.

B is the batch, D the width, L the number of layers, n the number of ranks, e the bytes of an element, and c the bytes
of an element of the loss's dtype (4, or 8 in float64).

Parameters, gradients and optimizer state are the shards of `contract.layout`. The optimizer's state is as large as what
it updates for SGD with momentum, and twice as large for AdamW, which keeps two moments (Kingma and Ba, 1412.6980). All
of them have the problem's dtype: this is the accounting of ZeRO (Rajbhandari et al., 1910.02054, section 3.1) without
the float32 copies. Step counters take a few bytes and are not counted.

Activations are what the backward pass needs besides parameters and batch, at the end of the forward pass: for each
layer its input (for dW = X^T dZ) and its pre-activation Z (for gelu'), and for the loss the residual (Korthikanti et
al., 2205.05198, count in the same way). This is what autograd keeps in `torch_impl`; XLA may keep less and recompute
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from contract import strategies
from contract.layout import chunks_of, held_by, kept, layout, share, unit_of
from contract.optimizer import SLOTS
from contract.problem import BYTES
from contract.share import HELD, Part, length
from contract.strategy import Run


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int

    def to_json(self) -> dict[str, int]:
        """Name -> bytes."""
        return asdict(self)


def memory(run: Run) -> list[Memory]:
    """For each rank, what it holds in one step of `run`.

    Where JAX runs one program on all stages of a pipeline, every rank holds as many layers as the longest stage.
    """
    sizes = [[_bytes(run, parts) for parts in layout(run, of)] for of in HELD]
    if "pipeline_parallel" in run.strategies and run.implementation != "torch":
        sizes = [[max(each)] * run.world_size for each in sizes]
    return [_memory(run, rank, *each) for rank, each in enumerate(zip(*sizes, strict=True))]


def of_rank(run: Run, rank: int) -> Memory:
    """The same for one rank in torch, without a look at all others."""
    return _memory(run, rank, *(_bytes(run, held_by(run, rank, of)) for of in HELD))


def _memory(run: Run, rank: int, parameters: int, gradients: int, updated: int) -> Memory:
    return Memory(parameters, gradients, len(SLOTS[run.optimizer]) * updated, activations(run, rank))


def _bytes(run: Run, parts: Sequence[Part]) -> int:
    elements = sum(
        prod(map(length, *each))
        for part in parts
        for each in zip(part.cuts, run.problem.shape(part.layer), strict=True)
    )
    return elements * BYTES[run.problem.dtype]


def gathered(run: Run, rank: int) -> int:
    """Bytes of the parameters that are gathered for the forward pass and kept for the backward pass."""
    gathers = [a.size for a in run.axes if strategies.gathers(a.strategy)]
    if not gathers or run.gathered_again:
        return 0
    mine = share(run, rank)
    used = [mine.used_backward(part, first=not part.layer) for part in mine.parts]
    return prod(gathers) * sum(elements for of_part in used for _, elements in of_part) * BYTES[run.problem.dtype]


def activations(run: Run, rank: int) -> int:
    """Bytes that one rank keeps for the backward pass. The input of layer 0 is the batch and is not counted.

    Every layer counts as the strategies cut it (`kept` in `contract.strategies`), for all rows that the rank works on.
    single_device keeps L - 1 inputs and L pre-activations, (2 L - 1) B D e, and the residual, B D c. tensor_parallel
    keeps (L - 1) B D e + L B D / n e + B D / n c, and megatron_tensor_parallel L B D / n e + (L - 1) B D e + B D c. The
    first part of a pipeline does not keep the input of its first layer, and only the last part keeps the residual.
    What is `gathered` and kept is part of it.

    How many microbatches a stage of a pipeline keeps at a time follows from its schedule: a microbatch counts from its
    forward pass until its backward pass, so 1F1B keeps p of them on the first stage, and GPipe all m. Where the
    backward pass is split, the gradient of a pre-activation takes the place of the pre-activation until the gradient of
    the weights; the pre-activations within a unit of layers stay as well.
    """
    problem, mine = run.problem, share(run.in_torch, rank)
    e, c, unit = BYTES[problem.dtype], BYTES[mine.loss_dtype], unit_of(run)
    layers, residual = kept(run, rank)
    left = iter(layers)
    whole, put_off = [], []  # bytes per row of each chunk, until the backward pass and until that of the weights
    for parts in chunks_of(run, rank):
        of_chunk = [next(left) for _ in parts]
        first, last = parts[0].layer == 0, parts[-1].layer == problem.depth - 1
        elements = sum(layer.preactivation + layer.input for layer in of_chunk) - (of_chunk[0].input if first else 0)
        inner = sum(layer.preactivation for i, layer in enumerate(of_chunk) if (i + 1) % unit)
        whole.append(elements * e + (residual * c if last else 0))
        put_off.append((elements + inner) * e)
    if mine.schedule is None:
        return round(sum(mine.microbatches) * whole[0]) + gathered(run, rank)
    now = most = 0.0
    for action in mine.schedule.orders[run.mesh.coordinates(rank)["pp"]]:
        rows = mine.microbatches[action.microbatch]
        if action.kind == "forward":
            now += rows * whole[action.chunk]
        elif action.kind == "backward":
            now -= rows * whole[action.chunk]
        elif action.kind == "backward_input":
            now += rows * (put_off[action.chunk] - whole[action.chunk])
        else:
            now -= rows * put_off[action.chunk]
        most = max(most, now)
    return round(most) + gathered(run, rank)
