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

from dataclasses import asdict, dataclass
from math import prod

from contract.layout import layout
from contract.optimizer import SLOTS
from contract.problem import BYTES, split_sizes
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
    sizes = [_parameters(run, rank) for rank in range(run.degree)]
    if run.strategy == "pipeline_parallel" and run.implementation != "torch":
        sizes = [max(sizes)] * run.degree
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

    single_device, data_parallel: b = B or the rank's share of it: L - 1 inputs and L pre-activations, (2 L - 1) b D e,
        and the residual, b D c.
    tensor_parallel: the inputs are gathered, B D e each; the rest is split: (L - 1) B D e + L B D / n e + B D / n c.
    megatron_tensor_parallel: of each of L / 2 pairs the pre-activation and the activation between the two are split,
        the input and the pre-activation after the all_reduce are whole: L B D / n e + (L - 1) B D e + B D c.
    pipeline_parallel: a stage of l layers keeps all m microbatches (GPipe, 1811.06965): 2 l B D e, (2 l - 1) B D e in
        the first stage; the last one keeps the residual too, B D c.
    """
    problem, n = run.problem, run.degree
    e, c = BYTES[problem.dtype], 8 if problem.dtype == "float64" else 4
    layers, whole = problem.layers, problem.batch * problem.width
    if run.strategy == "tensor_parallel":
        return (layers - 1) * whole * e + layers * whole // n * e + whole // n * c
    if run.strategy == "megatron_tensor_parallel":
        return layers * whole // n * e + (layers - 1) * whole * e + whole * c
    if run.strategy == "pipeline_parallel":
        mine = split_sizes(layers, n)[rank]
        return (2 * mine - (rank == 0)) * whole * e + (whole * c if rank == n - 1 else 0)
    rows = split_sizes(problem.batch, n)[rank] * problem.width
    return (2 * layers - 1) * rows * e + rows * c
