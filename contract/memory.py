"""The closed form of memory: what each rank holds during a training step, derived from the sizes alone.

B is the batch, D the width, L the number of layers, n the number of ranks, e the bytes of an element, and c the bytes
of an element of the loss's dtype (4, or 8 in float64).

Parameters, gradients and optimizer state are the shards of `contract.layout`. The optimizer's state is as large as what
it updates for SGD with momentum, and twice as large for AdamW, which keeps two moments (Kingma and Ba, 1412.6980). All
of them have the problem's dtype: this is the accounting of ZeRO (Rajbhandari et al., 1910.02054, section 3.1) without
the float32 copies. Step counters take a few bytes and are not counted.

Activations are what the backward pass needs besides parameters and batch, at the end of the forward pass: what
autograd keeps in `torch_impl`, which `contract.kept` lists by tensors. Of an MLP it is each layer's input (for dW = X^T
dZ) and its pre-activation Z (for gelu'), and for the loss the residual (Korthikanti et al., 2205.05198, count in the
same way). XLA may keep less and recompute it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

from contract import strategies
from contract.kept import Kept, nbytes, of_output
from contract.layout import chunks_of, held_by, kept, kept_of, layout, share, unit_of
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
    alike = Counter(id(part.cuts) for part in parts)  # layers that are cut alike share their cuts
    first = {id(part.cuts): part for part in reversed(parts)}
    elements = sum(
        many * prod(map(length, *each))
        for key, many in alike.items()
        for each in zip(first[key].cuts, run.problem.shape(first[key].layer), strict=True)
    )
    return elements * BYTES[run.problem.dtype]


def gathered(run: Run, rank: int) -> int:
    """Bytes of the parameters that are gathered for the forward pass and kept for the backward pass.

    Where they are gathered again, vectors are kept nevertheless; of a block that is run again, nothing is.
    """
    gathers = [a.size for a in run.axes if strategies.gathers(a.strategy)]
    if not gathers or (run.recompute == "block" and "pipeline_parallel" not in run.strategies):
        return 0
    mine, sizes = share(run, rank), list[int]()
    known: dict[tuple[int, bool], int] = {}  # of layers that are cut alike
    for part in mine.parts:
        key = id(part.cuts), part.layer == 0
        if key not in known:
            needed = () if run.gathered_again else mine.used_backward(part, first=not part.layer)
            gains = [elements for name, elements in mine.tensors(part) if name.startswith("gain") and part.layer]
            known[key] = sum(elements for _, elements in needed) + sum(gains)
        sizes.append(known[key])
    return prod(gathers) * sum(sizes) * BYTES[run.problem.dtype]


def activations(run: Run, rank: int) -> int:
    """Bytes that one rank keeps for the backward pass. The input of layer 0 is the batch and is not counted.

    Every layer counts as the strategies cut it (`kept` in `contract.strategies`), for all rows that the rank works on.
    single_device keeps L - 1 inputs and L pre-activations, (2 L - 1) B D e, and the residual, B D c. tensor_parallel
    keeps (L - 1) B D e + L B D / n e + B D / n c, and megatron_tensor_parallel L B D / n e + (L - 1) B D e + B D c. The
    first part of a pipeline does not keep the input of its first layer, and only the last part keeps the residual.
    What is `gathered` and kept is part of it. What is `recomputed` is not.

    How many microbatches a stage of a pipeline keeps at a time follows from its schedule: a microbatch counts from its
    forward pass until its backward pass, so 1F1B keeps p of them on the first stage, and GPipe all m. Where the
    backward pass is split, the gradients of the results of the products are kept until the gradients of the weights,
    and all that comes before the last product of a unit of layers.
    """
    mine, unit = share(run.in_torch, rank), unit_of(run)
    residual = nbytes(kept(run, (of_output(run.problem),)))
    whole, put_off = [], []  # bytes per row of each chunk, until the backward pass and until that of the weights
    known: dict[tuple[type, bool, int], tuple[int, int]] = {}  # of layers of one kind, in one place of their unit
    for parts in chunks_of(run, rank):
        stored, waiting = 0, 0
        for i, part in enumerate(parts):
            key = type(part.cuts), part.layer == 0, i % unit
            if key not in known:
                tensors = without_input(run, part) if part.layer == 0 else kept_of(run, part)
                after = ("result",) if (i + 1) % unit == 0 else ()
                known[key] = nbytes(remembered(run, tensors, first=i % unit == 0), "put_off"), nbytes(tensors, *after)
            stored, waiting = stored + known[key][0], waiting + known[key][1]
        whole.append(stored + (residual if parts[-1].layer == run.problem.depth - 1 else 0))
        put_off.append(waiting)
    if mine.schedule is None:
        return sum(mine.microbatches) * whole[0] + gathered(run, rank)
    now = most = 0
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
    return most + gathered(run, rank)


def without_input(run: Run, part: Part) -> list[Kept]:
    """What a rank keeps of the model's first layer, whose input is the batch and has no gradient."""
    return [tensor for tensor in kept_of(run, part) if tensor.role not in ("input", "of_input")]


def remembered(run: Run, tensors: Sequence[Kept], first: bool) -> list[Kept]:
    """Those of a layer's tensors that are not computed again. first: of the layers of a block, whose input is kept."""
    if run.recompute == "block":
        return [
            tensor._replace(size=BYTES[run.problem.dtype])
            for tensor in tensors[:1]
            if first and tensor.role == "of_input"
        ]
    return [tensor for tensor in tensors if run.recompute == "none" or tensor.role != "scores"]


def recomputed(run: Run, rank: int) -> int:
    """Bytes that a rank holds besides while it computes a block, or the attention of one, again, for a microbatch."""
    mine = share(run.in_torch, rank)
    parts = [part for part in mine.parts if run.recompute != "none"]
    blocks = [[t for part in parts[i : i + 2] for t in kept_of(run, part)] for i in range(0, len(parts), 2)]
    if run.recompute == "selective":
        blocks = [[t for t in block if t.role in ("attended", "scores")] for block in blocks]
    return max(mine.microbatches) * max((nbytes(block, "put_off") for block in blocks), default=0)
