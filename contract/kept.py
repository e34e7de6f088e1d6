"""What autograd keeps in torch_impl for the backward pass of one sample, besides parameters and batch, by tensors.

The dims of a tensor have names, so that a strategy can say which of them it splits. Of the MLP: "up_in" and "up_out" of
even layers, "down_in" and "down_out" of odd ones, and "features" of the output. Of a block: "sequence" in the residual
stream, "product_sequence" in the products, "attend_sequence" and "keys" in attention; "heads" in the products,
"attend_heads" in attention; "up_out" between the products of an MLP. A dim without a name is never split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from contract.problem import BYTES, Problem
from contract.transformer import Transformer

Dims = tuple[tuple[str, int], ...]  # (name, size)


class Kept(NamedTuple):
    """One tensor of one sample. size: bytes of an element.

    role: "input" of a layer; "of_input", needed for the input's gradient alone, as the input of a block is; "scores",
    the probabilities of attention, and "attended", what they are made of; "result", needed by what comes after the last
    product with a weight; "put_off", the gradient of a product's result, which waits for the gradient of the weight.
    """

    role: str
    size: int
    dims: Dims

    @property
    def elements(self) -> int:
        """The elements of a sample."""
        return prod(size for _, size in self.dims)


def nbytes(kept: Iterable[Kept], *without: str) -> int:
    """Bytes of a sample in all of these but those with one of the roles `without`."""
    return sum(t.size * t.elements for t in kept if t.role not in without)


def split(kept: Iterable[Kept], dims: Collection[str], n: int) -> list[Kept]:
    """The same where these dims are split over n ranks."""
    return [t._replace(dims=tuple((name, d // n if name in dims else d) for name, d in t.dims)) for t in kept]


@lru_cache(64)
def of_output(problem: Problem) -> Kept:
    """The residual of the loss, in the dtype of the loss. What a pipeline passes on has its dims."""
    return Kept("result", max(BYTES[problem.dtype], 4), (("sequence", problem.sequence), ("features", problem.width)))


@lru_cache(64)
def of_layer(problem: Problem, layer: int) -> tuple[Kept, ...]:
    """What one layer keeps, on a single device and with all that it would keep in the middle of the model."""
    if isinstance(problem, Transformer):
        return of_attention(problem) if layer % 2 == 0 else of_experts(problem) if problem.experts else of_mlp(problem)
    e, kind = BYTES[problem.dtype], ("up", "down")[layer % 2]
    into, out = ((f"{kind}_in", problem.width),), ((f"{kind}_out", problem.width),)
    return Kept("input", e, into), Kept("result", e, out), Kept("put_off", e, out)  # for dW = X^T dZ, and for gelu'


def of_norm(problem: Transformer) -> tuple[Kept, ...]:
    """x and 1 / sqrt(mean(x^2) + epsilon) in float32 at least; their product, for the gain; the normalized input."""
    e, tokens, d = BYTES[problem.dtype], ("sequence", problem.sequence), ("", problem.width)
    wide, gathered = max(e, 4), (("product_sequence", problem.sequence), d)
    return (
        Kept("of_input", wide, (tokens, d)),
        Kept("of_input", wide, (tokens,)),
        Kept("", e, (tokens, d)),
        Kept("", e, gathered),
        Kept("put_off", e, (tokens, d)),
    )


def of_attention(problem: Transformer) -> tuple[Kept, ...]:
    """Q, K and V; the probabilities, also in the problem's dtype if the softmax is in another; the output."""
    e, s, heads, k = BYTES[problem.dtype], problem.sequence, problem.heads, ("", problem.width // problem.heads)
    h, queries, keys = ("attend_heads", heads), ("attend_sequence", s), ("keys", s)
    of_product = (("product_sequence", s), ("heads", heads), k)
    return (
        *of_norm(problem),
        Kept("attended", e, (queries, h, k)),
        *[Kept("attended", e, (keys, h, k))] * 2,
        *(Kept("scores", size, (h, queries, keys)) for size in sorted({e, max(e, 4)})),
        Kept("", e, of_product),
        *[Kept("put_off", e, of_product)] * 3,
        Kept("put_off", e, (("sequence", s), ("", problem.width))),
    )


def of_mlp(problem: Transformer) -> tuple[Kept, ...]:
    """The pre-activation, for gelu', and the activation."""
    e, s, d = BYTES[problem.dtype], problem.sequence, problem.width
    hidden = (("product_sequence", s), ("up_out", problem.ff))
    rest = Kept("put_off", e, hidden), Kept("put_off", e, (("sequence", s), ("", d)))
    return *of_norm(problem), *[Kept("", e, hidden)] * 2, *rest


def of_experts(problem: Transformer) -> tuple[Kept, ...]:
    """What the gates are made of, and the numbers of the experts, in 8 bytes; the slots of all tokens; as an MLP, of
    what the experts are given. Several ranks that split the samples exchange as many slots as they have."""
    e, tokens, k = BYTES[problem.dtype], ("product_sequence", problem.sequence), ("", problem.top_k)
    wide, experts, slots = max(e, 4), ("", problem.experts), ("", problem.capacity)
    given, hidden = (experts, slots, ("", problem.width)), (experts, slots, ("up_out", problem.ff))
    return (
        *of_norm(problem),
        *(Kept("result", size, (tokens, *d)) for size, d in ((wide, (experts,)), (wide, ()), (wide, (k,)), (8, (k,)))),
        *(Kept("result", e, (tokens, *d, experts, slots)) for d in ((k,), ())),  # of every choice, and with the gates
        Kept("", e, (tokens, experts, slots)),  # 0 or 1, for the way there
        Kept("", e, given),
        *[Kept("", e, hidden)] * 2,
        Kept("result", e, given),
        *(Kept("put_off", e, dims) for dims in ((tokens, experts), given, hidden)),
    )
