"""A microbatch's passes through a chunk of layers: forward, and backward as a whole or split into its two gradients.

The zero-bubble schedules (Qi et al., 2401.10241) compute the gradient of the input (B) at once, because another stage
waits for it, and put off those of the weights (W). B walks back through the graph and stops beside every product with a
weight, where it notes the gradient of the product's result, dZ. W is then the other half of that product's backward
pass, dW = X^T dZ, and computes nothing a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Function = Callable[[Tensor], Tensor]


@dataclass
class Passage:
    """What is kept of a microbatch in a chunk.

    segments: (input, output) of each function of the chunk, each with a graph of its own. put_off: what W needs, (an
    operation that uses weights, the gradient of its result, those weights).
    """

    segments: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    put_off: list[tuple[GradientEdge, Tensor, list[Tensor]]] = field(default_factory=list)

    def put_off_bytes(self) -> int:
        """Bytes of the gradients that wait for W, each memory once."""
        storages = [grad.untyped_storage() for _, grad, _ in self.put_off]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def forward(functions: Sequence[Function], x: Tensor) -> Passage:
    """Y[b, D] of X[b, D], one function after the other. The result is the last segment's output."""
    passage = Passage()
    for function in functions:
        if passage.segments:
            x = passage.segments[-1][1].detach().requires_grad_()
        # A view of the leaf is what `shardiff trace` sees a forward pass begin with, if a collective comes first.
        passage.segments.append((x, function(x.view_as(x))))
    return passage


def backward(passage: Passage, grad: Tensor | None) -> Tensor | None:
    """Both gradients: those of the weights are accumulated, and that of the input is returned, if it needs one."""
    for x, out in reversed(passage.segments):
        out.backward(grad)
        grad = x.grad
    passage.segments.clear()
    return grad


def backward_input(passage: Passage, grad: Tensor | None) -> Tensor | None:
    """The gradient of the input, if it needs one. Afterwards the passage keeps only what W needs."""
    while passage.segments:
        x, out = passage.segments.pop()
        uses = uses_of_weights(out, x)
        inputs = [*(edge for edge, _ in uses), *([x] if x.requires_grad else [])]
        grads = torch.autograd.grad(out, inputs, None if grad is None else [grad], retain_graph=True)
        passage.put_off += [(edge, dz, weights) for (edge, weights), dz in zip(uses, grads, strict=False)]
        grad = grads[-1] if x.requires_grad else None
    return grad


def backward_weight(passage: Passage) -> None:
    """Accumulate the gradients of the weights."""
    while passage.put_off:
        edge, dz, weights = passage.put_off[0]
        torch.autograd.backward([edge], [dz], inputs=weights)
        del passage.put_off[0]


def uses_of_weights(out: Tensor, x: Tensor) -> list[tuple[GradientEdge, list[Tensor]]]:
    """The operations between x and `out` that use a leaf other than x, each with its leaves; the last one first.

    A product whose result goes straight into a sum with a bias is one use with it: one gradient serves both.
    """
    weights: dict[Node, list[Tensor]] = {}
    below: dict[Node, list[Node]] = {}
    readers: Counter[Node] = Counter()
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in below:
            continue
        before = [each for each, _ in node.next_functions if each is not None]
        leaves: list[Tensor | None] = [getattr(each, "variable", None) for each in before]  # what a leaf's node has
        below[node] = [each for each, leaf in zip(before, leaves, strict=True) if leaf is None]
        if mine := [leaf for leaf in leaves if leaf is not None and leaf is not x]:
            weights[node] = mine
        readers.update(below[node])
        waiting += below[node]
    for node in list(weights):
        for each in below[node]:
            if node in weights and each in weights and readers[each] == 1:
                weights[node] += weights.pop(each)
    return [(GradientEdge(node, 0), used) for node, used in weights.items()]
