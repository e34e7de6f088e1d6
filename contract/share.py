"""What one rank of a run works on, in terms that every strategy can cut further: parts, passes, what is kept.

The files in `contract.strategies` say how each strategy cuts them; `layout`, `cost` and `memory` combine the axes of a
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from contract.problem import Problem
from contract.schedule import Schedule

WHOLE = slice(None)
HELD = ("parameters", "gradients", "optimizer_state")  # what a rank holds between steps, or at the end of one


class Part(NamedTuple):
    """Layer number `layer` as one rank holds it: the slices that cut w[in, out] and b[out]."""

    layer: int
    w: tuple[slice, slice]
    b: tuple[slice]


def narrow(cut: slice, width: int, parts: int, index: int) -> slice:
    """Share number `index` of `parts` of the slice `cut` of a dim of size `width`. A result can be narrowed again."""
    start, stop, _ = cut.indices(width)
    size, larger = divmod(stop - start, parts)  # as `split_slices`, without the other shares
    start += index * size + min(index, larger)
    return slice(start, start + size + (index < larger))


def narrow_rows(parts: Sequence[Part], problem: Problem, n: int, index: int) -> list[Part]:
    """Share number `index` of `n` of every parameter's rows: W[D_n, F], b[F_n]."""

    def mine(of: slice) -> slice:
        return narrow(of, problem.width, n, index)

    return [Part(layer, (mine(w[0]), w[1]), (mine(b[0]),)) for layer, w, b in parts]


def length(cut: slice, width: int) -> int:
    """The size of the slice `cut` of a dim of size `width`."""
    start, stop, _ = cut.indices(width)
    return stop - start


class Pass(NamedTuple):
    """One forward and one backward pass through the layers that a rank holds, or through one chunk of them.

    rows: of the batch. input_split: whether the input is split in the way an earlier layer's output is. input_grad:
    whether the gradient of the input is needed, as it is if an earlier stage has computed the input. parts: of the
    chunk, where a pipeline's stage holds several; None for all that the rank holds.
    """

    rows: int
    input_split: bool = False
    input_grad: bool = False
    parts: tuple[Part, ...] | None = None


class Kept(NamedTuple):
    """Elements per row that one layer keeps for its backward pass: its input, and its pre-activation."""

    input: float
    preactivation: float


class Sent(NamedTuple):
    """One collective of a group. elements: of its payload. dtype: None stands for the problem's.

    edges: of a permute, (source, target) as positions on the axis. tick: of a permute; all sends of one tick are one
    permute. times: how often it runs in a step.
    """

    op: str
    elements: int
    phase: str
    detail: str
    dtype: str | None = None
    edges: tuple[tuple[int, int], ...] = ()
    tick: int = 0
    times: int = 1


@dataclass(frozen=True)
class Asked:
    """What a strategy looks at before it refuses a run.

    rows: the smallest number of rows of the batch that any rank has. unit: how many layers must stay together.
    shortest: the fewest rows of any parameter, as the deeper strategies leave it.
    schedule, chunks: of a pipeline.
    """

    problem: Problem
    microbatches: int
    rows: int
    unit: int
    shortest: int
    schedule: str = "gpipe"
    chunks: int = 2


def uneven_rows(name: str, asked: Asked, n: int) -> str | None:
    """Why a strategy that splits samples, and parameters by rows, cannot run on n ranks; None if it can."""
    if asked.shortest % n:
        width = asked.problem.width
        if asked.shortest == width:
            return f"{name} needs a width divisible by its degree: width {width}, degree {n}"
        return f"{name} needs a number of rows that its degree divides: {asked.shortest} of {width}, degree {n}"
    if asked.problem.batch < n:
        return f"{name} over {n} ranks needs a batch of at least {n}, got {asked.problem.batch}"
    return None


@dataclass(frozen=True)
class Share:
    """What one rank works on: the parameters and the gradients that it holds, and the passes that it makes in one step.

    microbatches: the rows of each. In torch each microbatch is one pass of a pipeline's stage; in JAX a stage makes one
    pass in every tick. features: of an activation that is passed on, as this rank holds it. gathered_again: whether
    parameters that are gathered before use are freed after the forward pass and gathered again for the backward pass.
    schedule: of a pipeline. by_ticks: whether what is sent follows the schedule's ticks, as in a program that all
    stages run, and not the order in which messages come about.
    """

    problem: Problem
    parts: tuple[Part, ...]
    gradients: tuple[Part, ...]
    passes: tuple[Pass, ...]
    microbatches: tuple[int, ...]
    features: int
    implementation: str = "torch"
    gathered_again: bool = False
    schedule: Schedule | None = None
    by_ticks: bool = False

    @property
    def derived(self) -> bool:
        """Whether XLA derives the program from annotations."""
        return self.implementation == "annotated"

    def parts_of(self, one: Pass) -> tuple[Part, ...]:
        """The parts that a pass goes through."""
        return self.parts if one.parts is None else one.parts

    @property
    def loss_dtype(self) -> str:
        """The dtype in which the loss is summed: float32 at least."""
        return "float64" if self.problem.dtype == "float64" else "float32"

    def loss(self) -> Sent:
        """The sum of the loss over an axis, one scalar."""
        return Sent("all_reduce", 1, "forward", "loss", self.loss_dtype)

    def elements(self, part: Part) -> tuple[int, int]:
        """The elements of w and of b that this rank holds."""
        rows, columns, of_b = (length(s, self.problem.width) for s in (*part.w, *part.b))
        return rows * columns, of_b

    def messages(self, part: Part) -> list[tuple[str, int]]:
        """What a collective over parameters carries: names and elements. In torch, w and b of a layer go together."""
        of_w, of_b = self.elements(part)
        if self.implementation == "torch":
            return [(f"w{part.layer} and b{part.layer}", of_w + of_b)]
        return [(f"w{part.layer}", of_w), (f"b{part.layer}", of_b)]
