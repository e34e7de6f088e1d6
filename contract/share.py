"""What one rank of a run works on, in terms that every strategy can cut further: parts, passes, what is kept.

The files in `contract.strategies` say how each strategy cuts them; `layout`, `cost` and `memory` combine the axes of a
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from contract.problem import Problem
from contract.schedule import Schedule
from contract.transformer import Attention, Transformer

WHOLE = slice(None)
HELD = ("parameters", "gradients", "optimizer_state")  # what a rank holds between steps, or at the end of one


Cut = tuple[slice, ...]  # of one array, a slice for every dim


class Part(NamedTuple):
    """Layer number `layer` as one rank holds it. cuts: the slices of each parameter, as a tuple of the layer's type."""

    layer: int
    cuts: Any


@lru_cache(64)
def whole_parts(problem: Problem, layers: int | None = None) -> tuple[Part, ...]:
    """The layers of the full model, or the first few, uncut."""
    return tuple(Part(i, uncut(problem.shape(i))) for i in range(min(problem.depth, layers or problem.depth)))


@lru_cache(64)
def uncut(shapes: Any) -> Any:
    """The slices that leave a layer whole. shapes: of its parameters."""
    return shapes._make((WHOLE,) * len(shape) for shape in shapes)


def narrow(cut: slice, width: int, parts: int, index: int) -> slice:
    """Share number `index` of `parts` of the slice `cut` of a dim of size `width`. A result can be narrowed again."""
    start, stop, _ = cut.indices(width)
    size, larger = divmod(stop - start, parts)  # as `split_slices`, without the other shares
    start += index * size + min(index, larger)
    return slice(start, start + size + (index < larger))


def narrow_rows(parts: Sequence[Part], problem: Problem, n: int, index: int) -> list[Part]:
    """Share number `index` of `n` of every parameter's rows: W[D_n, F], b[F_n]."""

    def mine(cut: Cut, shape: tuple[int, ...]) -> Cut:
        return (narrow(cut[0], shape[0], n, index), *cut[1:])

    return each_once(parts, lambda part: part.cuts._make(map(mine, part.cuts, problem.shape(part.layer))))


def each_once(parts: Sequence[Part], cut: Callable[[Part], Any]) -> list[Part]:
    """The parts with other cuts. Parts that share their cuts, as alike layers do, share the new ones, made once."""
    made: dict[int, Any] = {}
    for part in parts:
        if id(part.cuts) not in made:
            made[id(part.cuts)] = cut(part)
    return [Part(part.layer, made[id(part.cuts)]) for part in parts]


def narrow_dims(parts: Sequence[Part], problem: Problem, dims: Mapping[type, Any], n: int, index: int) -> list[Part]:
    """Share number `index` of `n` of one dim of every parameter. dims: by type of layer; None leaves one whole."""

    def mine(cut: Cut, shape: tuple[int, ...], dim: int | None) -> Cut:
        return tuple(narrow(c, d, n, index) if i == dim else c for i, (c, d) in enumerate(zip(cut, shape, strict=True)))

    def cut(part: Part) -> Any:
        return part.cuts._make(map(mine, part.cuts, problem.shape(part.layer), dims[type(part.cuts)]))

    return each_once(parts, cut)


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


class Sent(NamedTuple):
    """One collective of a group. elements: of its payload. dtype: None stands for the problem's.

    edges: of a permute, (source, target) as positions on the axis. tick: of a permute; all sends of one tick are one
    permute. times: how often it runs in a step. again: whether a block that is run again in the backward pass sends it
    again: all that the forward pass sends but the sum after the last product, whose result the backward pass needs not.
    """

    op: str
    elements: int
    phase: str
    detail: str
    dtype: str | None = None
    edges: tuple[tuple[int, int], ...] = ()
    tick: int = 0
    times: int = 1
    again: bool = False


@dataclass(frozen=True)
class Asked:
    """What a strategy looks at before it refuses a run.

    rows: the smallest number of rows of the batch that any rank has. unit: how many layers must stay together.
    heights: of the parameters, their numbers of rows, as the deeper strategies leave them.
    schedule, chunks: of a pipeline. sequence: the tokens of a sample. heads: of a rank, as
    the deeper strategies leave them.
    """

    problem: Problem
    microbatches: int
    rows: int
    unit: int
    heights: frozenset[int]
    schedule: str = "gpipe"
    chunks: int = 2
    sequence: int = 1
    heads: int = 1


def uneven_rows(name: str, asked: Asked, n: int) -> str | None:
    """Why a strategy that splits samples, and parameters by rows, cannot run on n ranks; None if it can."""
    height = min((height for height in asked.heights if height % n), default=None)
    if height == asked.problem.width:
        return f"{name} needs a width divisible by its degree: width {height}, degree {n}"
    if height is not None:
        return f"{name} needs its degree to divide the rows of every parameter: one has {height}, degree {n}"
    if asked.problem.batch < n:
        return f"{name} over {n} ranks needs a batch of at least {n}, got {asked.problem.batch}"
    return None


def uneven_heads(name: str, problem: Problem, n: int) -> str | None:
    """Why a transformer's heads and features cannot be split n ways; None if they can."""
    if not isinstance(problem, Transformer):
        return f"{name} splits blocks of a transformer, and the problem is an MLP"
    if problem.heads % n:
        return f"{name} needs heads divisible by its degree: {problem.heads} heads, degree {n}"
    if problem.ff % n:
        return f"{name} needs an MLP width divisible by its degree: ff {problem.ff}, degree {n}"
    return None


def uneven_sequence(name: str, asked: Asked, pieces: int) -> str | None:
    """Why a transformer's sequence cannot be cut into so many pieces; None if it can."""
    if not isinstance(asked.problem, Transformer):
        return f"{name} splits the sequence of a transformer, and the problem is an MLP"
    if asked.problem.experts:
        return f"{name} cannot split the sequence where experts count their tokens over all of it"
    if asked.sequence % pieces:
        return f"{name} needs a sequence that divides into {pieces} pieces, got {asked.sequence} tokens"
    return None


@dataclass(frozen=True)
class Share:
    """What one rank works on: the parameters and the gradients that it holds, and the passes that it makes in one step.

    microbatches: the rows of each. In torch each microbatch is one pass of a pipeline's stage; in JAX a stage makes one
    pass in every tick. features: of an activation that is passed on, as this rank holds it. gathered_again: whether
    parameters that are gathered before use are freed after the forward pass and gathered again for the backward pass.
    schedule: of a pipeline. by_ticks: whether what is sent follows the schedule's ticks, as in a program that all
    stages run, and not the order in which messages come about. sequence: the tokens of a sample inside the layers.
    used: the parts as they are computed with, which may have been gathered.
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
    sequence: int = 1
    used: tuple[Part, ...] = ()

    @property
    def derived(self) -> bool:
        """Whether XLA derives the program from annotations."""
        return self.implementation == "annotated"

    def parts_of(self, one: Pass) -> tuple[Part, ...]:
        """The parts that a pass goes through."""
        return self.parts if one.parts is None else one.parts

    def activation(self, one: Pass) -> int:
        """The elements of a whole activation, as it enters a layer: rows, tokens of a sample, features."""
        return one.rows * self.sequence * self.problem.width

    @property
    def loss_dtype(self) -> str:
        """The dtype in which the loss is summed: float32 at least."""
        return "float64" if self.problem.dtype == "float64" else "float32"

    def loss(self) -> Sent:
        """The sum of the loss over an axis, one scalar."""
        return Sent("all_reduce", 1, "forward", "loss", self.loss_dtype)

    def elements(self, part: Part) -> list[int]:
        """The elements of each parameter that this rank holds."""
        return [prod(map(length, *each)) for each in zip(part.cuts, self.problem.shape(part.layer), strict=True)]

    def tensors(self, part: Part) -> list[tuple[str, int]]:
        """The same with names: w3, b3."""
        return list(zip(names(part), self.elements(part), strict=True))

    def messages(self, part: Part) -> list[tuple[str, int]]:
        """What a collective over parameters carries: names and elements. In torch, those of a layer go together."""
        if self.implementation == "torch":
            return [(" and ".join(names(part)), sum(self.elements(part)))]
        return self.tensors(part)

    def used_backward(self, part: Part, first: bool) -> list[tuple[str, int]]:
        """Those of `tensors` that the backward pass needs, without vectors. first: the input's gradient is not needed.

        The w of a layer of the MLP is needed for that alone. In a block it is needed for the gain's gradient, too.
        """
        kept = {
            name
            for name, kind in zip(names(part), part.cuts._fields, strict=True)
            if kind not in ("b", "gain") and not (first and kind == "w")
        }
        return [(name, elements) for name, elements in self.tensors(part) if name in kept]


def names(part: Part) -> tuple[str, ...]:
    """The names of a part's parameters: w3, b3."""
    return tuple(f"{kind}{part.layer}" for kind in part.cuts._fields)


def attentions(share: Share, one: Pass) -> list[Part]:
    """The attention layers of a pass, one for each block."""
    return [part for part in share.parts_of(one) if isinstance(part.cuts, Attention)]


def heads_of(share: Share, one: Pass, part: Part) -> int:
    """The elements of a rank's q, or k, or v: its rows, its tokens, the features of its heads."""
    d = share.problem.width
    return one.rows * share.sequence * length(part.cuts.q[1], d)
