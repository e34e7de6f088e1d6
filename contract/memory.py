"""The closed form: what each rank holds in memory during a training step, derived from the sizes alone.

B batch, D width, L layers, n ranks, e bytes an element, c bytes an element of the loss's dtype (4; 8 in float64).

Parameters P are the shards of `contract.layout`; gradients are as large; the optimizer's state is P for SGD with
momentum and 2 P for AdamW (Kingma and Ba, 1412.6980: two moments). All are in the problem's dtype: ZeRO's accounting
(Rajbhandari et al., 1910.02054, section 3.1) without the float32 copies. Step counters, a few bytes, are left out.

Activations are what the backward pass needs besides parameters and batch, at the end of the forward pass: of each layer
its input (for dW = X^T dZ) and its pre-activation Z (for gelu'), and of the loss the residual (Korthikanti et al.,
2205.05198, count in the same way). That is what autograd keeps in `torch_impl`; XLA may keep less and compute it again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import prod

from contract.layout import kept, layout, share
from contract.optimizer import SLOTS
from contract.problem import BYTES
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
    sizes = [_parameters(run, rank) for rank in range(run.world_size)]
    if "pipeline_parallel" in run.strategies and run.implementation != "torch":
        sizes = [max(sizes)] * run.world_size
    slots = len(SLOTS[run.optimizer])
    return [Memory(size, size, slots * size, activations(run, rank)) for rank, size in enumerate(sizes)]


def _parameters(run: Run, rank: int) -> int:
    d = run.problem.width

    def length(s: slice) -> int:
        return len(range(*s.indices(d)))

    elements = sum(prod(map(length, part.w)) + length(part.b[0]) for part in layout(run)[rank])
    return elements * BYTES[run.problem.dtype]


def activations(run: Run, rank: int) -> int:
    """Bytes that one rank keeps for the backward pass. The input of layer 0 is the batch and is not counted.

    Of each of its layers, as the strategies cut them (`kept` in `contract.strategies`), for all rows that it works on:
    single_device keeps L - 1 inputs and L pre-activations, (2 L - 1) B D e, and the residual, B D c; tensor_parallel
    (L - 1) B D e + L B D / n e + B D / n c; megatron_tensor_parallel L B D / n e + (L - 1) B D e + B D c. The first
    stage of a pipeline keeps no input of its first layer, and only the last one the residual.
    """
    problem, mine = run.problem, share(replace(run, implementation="torch"), rank)
    e, c, rows = BYTES[problem.dtype], BYTES[mine.loss_dtype], sum(mine.microbatches)
    layers, residual = kept(run, rank)
    first, last = mine.parts[0].layer == 0, mine.parts[-1].layer == problem.layers - 1
    elements = sum(layer.preactivation + layer.input for layer in layers) - (layers[0].input if first else 0)
    return round(rows * (elements * e + (residual * c if last else 0)))
