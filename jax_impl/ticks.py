"""A pipeline's schedule as one program that all stages run, with the backward pass written by `jax.vjp` per action.

The transpose of a forward program runs all forward passes first, which is GPipe's order. Any other order interleaves
the two, so each action is differentiated by itself: F keeps its residuals in a slot, B and W take them from there
(`contract.slots`). In a tick each stage chooses its action by `lax.switch`, from tables made of the schedule, and then
permutes carry activations to the next part of the model and gradients to the part before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from contract.problem import Batch
from contract.schedule import Action, Schedule
from contract.slots import Slots, receiver, slots
from contract.strategies.pipeline_parallel import edge, permutes
from jax_impl.collectives import permute
from jax_impl.jax_versions import varies_over

Function = Callable[[list[Any], Array], Array]  # (layers, X[b, D]) -> Y[b, D]


@dataclass(frozen=True)
class Chunk:
    """Functions to be run one after the other, and each one's layers. Each is differentiated by itself."""

    functions: Sequence[Function]
    layers: Sequence[list[Any]]


@dataclass(frozen=True)
class Apart:
    """The residuals of a vjp without the layers, which every microbatch shares: how to put them together again."""

    tree: Any
    shared: tuple[int | None, ...]  # for each leaf of the tree, which leaf of the layers it is

    def restore(self, layers: list[Any], kept: Sequence[Array]) -> Callable[[Array], tuple[list[Any], Array]]:
        """The vjp: gradient of the output -> gradients of the layers, and of the input."""
        own, rest = jax.tree.leaves(layers), iter(kept)
        return jax.tree.unflatten(self.tree, [next(rest) if at is None else own[at] for at in self.shared])


def take_apart(vjp: Any, layers: list[Any]) -> tuple[list[Array], Apart]:
    """The residuals of a microbatch, and what they have in common for all microbatches."""
    own = jax.tree.leaves(layers)
    leaves, tree = jax.tree.flatten(vjp)
    shared = tuple(next((i for i, each in enumerate(own) if each is leaf), None) for leaf in leaves)
    return [leaf for leaf, at in zip(leaves, shared, strict=True) if at is None], Apart(tree, shared)


def forward(chunk: Chunk, x: Array) -> tuple[Array, list[list[Array]], list[Apart]]:
    """Y[b, D], and the residuals of every function."""
    kept, how = [], []
    for function, layers in zip(chunk.functions, chunk.layers, strict=True):
        x, vjp = jax.vjp(function, layers, x)
        own, apart = take_apart(vjp, layers)
        kept.append(own)
        how.append(apart)
    return x, kept, how


def execute(
    chunks: Sequence[Chunk],
    loss: Callable[[Array, Batch], Array],
    batch: Batch,
    schedule: Schedule,
    axis: str,
) -> tuple[Array, list[list[list[Any]]]]:
    """Run all microbatches X[m, b, D]: this stage's share of the loss, and the gradients of every chunk's layers."""
    told, stage = slots(schedule), lax.axis_index(axis)
    last_stage, last_chunk = schedule.parts[-1]
    message = varying(batch.x[0], axis)
    # For shapes and types alone; what nobody reads is not computed.
    out, example, how = forward(chunks[0], message)
    error = loss(out, Batch(*(a[0] for a in batch)))

    def at(numbers: Sequence[int]) -> Array:
        """A number of every stage: this stage's."""
        return jnp.asarray(numbers, jnp.int32)[stage]

    def store(name: str, like: Any) -> Any:
        """Empty slots, and one more, in which stages write what they need not keep."""
        return jax.tree.map(lambda a: zeros((told.depth[name] + 1, *a.shape), a, axis), like)

    def slot(name: str, row: Sequence[Action | None]) -> Array:
        """Where each stage's action of a tick finds or leaves something; the additional slot if it does not."""
        return at([told.depth[name] if a is None else told.of[name].get(a, told.depth[name]) for a in row])

    inputs, gradients = store("inputs", message), store("gradients", message)
    douts = [message for _ in how]
    residuals, put_off = store("residuals", example), store("put_off", douts)
    sums: Any = (
        zeros((), error, axis),
        [[jax.tree.map(lambda p: zeros(p.shape, p, axis), own) for own in chunk.layers] for chunk in chunks],
    )
    nothing = jax.tree.map(lambda a: zeros(a.shape, a, axis), (message, example, douts))

    def act(kind: str, chunk: int, row: Sequence[Action | None]) -> Callable[[Any], tuple[Any, Any]]:
        """What the stages do whose action in this tick is of this kind, on this chunk.

        sums -> (sums, (result, residuals to be kept, gradients to be put off)); of these two, what there is none of is
        zeros, which go to the additional slot.
        """
        i = at([0 if a is None else a.microbatch for a in row])
        of_input, of_gradient = slot("inputs", row), slot("gradients", row)
        of_residual = slot("residuals", [None if a is None else a._replace(kind="forward") for a in row])
        of_put_off = slot("put_off", row)
        functions, layers = chunks[chunk].functions, chunks[chunk].layers

        def run_forward(sums: Any) -> tuple[Any, Any]:
            share, grads = sums
            x = read(inputs, of_input)
            x = jnp.where(stage == 0, batch.x[i], x) if chunk == 0 else x
            out, kept, _ = forward(chunks[chunk], x)
            if chunk == last_chunk:  # the loss's gradient is the message that the last part sends to itself
                error, grad = jax.value_and_grad(loss)(out, Batch(*(a[i] for a in batch)))
                share = share + jnp.where(stage == last_stage, error, 0)
                out = jnp.where(stage == last_stage, grad, out)
            return (share, grads), (out, kept, nothing[2])

        def run_backward(sums: Any) -> tuple[Any, Any]:
            share, grads = sums
            kept = read(residuals, of_residual)
            came = read(put_off, of_put_off) if kind == "backward_weight" else None
            grad, of_layers, passed = read(gradients, of_gradient), [], []
            for number in reversed(range(len(functions))):
                passed.insert(0, grad)
                given = grad if came is None else came[number]
                mine, grad = how[number].restore(layers[number], kept[number])(given)
                of_layers.insert(0, mine)
            if kind != "backward_input":
                added = jax.tree.map(jnp.add, grads[chunk], of_layers)
                grads = [added if number == chunk else each for number, each in enumerate(grads)]
            return (share, grads), (grad, nothing[1], passed)

        if kind == "idle":
            return lambda sums: (sums, nothing)
        return run_forward if kind == "forward" else run_backward

    sent = {phase: permutes(schedule, phase, by_ticks=True) for phase in ("forward", "backward")}
    for tick, row in enumerate(told.rows):
        todo = [("idle", 0) if a is None else (a.kind, a.chunk) for a in row]
        branches = list(dict.fromkeys(todo))
        made = [act(kind, chunk, row) for kind, chunk in branches]
        sums, (result, kept, passed) = lax.switch(at([branches.index(each) for each in todo]), made, sums)
        if any(a is not None and a.kind == "forward" for a in row):
            residuals = write(residuals, slot("residuals", row), kept)
        if any(a is not None and a.kind == "backward_input" for a in row):
            later = [a and a.kind == "backward_input" and a._replace(kind="backward_weight") or None for a in row]
            put_off = write(put_off, slot("put_off", later), passed)
        inputs, gradients = deliver(schedule, told, tick, sent, result, (inputs, gradients), axis)
    return sums


def deliver(
    schedule: Schedule,
    told: Slots,
    tick: int,
    sent: dict[str, dict[int, list[list[Action]]]],
    result: Array,
    stores: tuple[Array, Array],
    axis: str,
) -> tuple[Array, Array]:
    """Put what each stage has computed where it is needed next: on another stage by a permute, or on its own."""
    stage, made = lax.axis_index(axis), []
    for phase, name, buffer in zip(("forward", "backward"), ("inputs", "gradients"), stores, strict=True):

        def into(buffer: Array, value: Array, receivers: Sequence[Action], name: str = name) -> Array:
            slots_of = {each.stage: told.of[name][each] for each in receivers}
            where = [slots_of.get(s, told.depth[name]) for s in range(schedule.stages)]
            return write(buffer, jnp.asarray(where, jnp.int32)[stage], value)

        for together in sent[phase].get(tick, []):
            with named(phase):
                arrived = permute(result, axis, [edge(schedule, action) for action in together])
            buffer = into(buffer, arrived, [each for action in together if (each := receiver(schedule, action))])
        own = [(action, receiver(schedule, action)) for action in told.rows[tick] if action is not None]
        stay = [each for action, each in own if each and each.stage == action.stage and each in told.of[name]]
        made.append(into(buffer, result, stay) if stay else buffer)
    return made[0], made[1]


def read(tree: Any, slot: Array) -> Any:
    """What is in a slot."""
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, slot, keepdims=False), tree)


def write(tree: Any, slot: Array, value: Any) -> Any:
    """The same slots with one replaced."""
    return jax.tree.map(lambda buffer, a: lax.dynamic_update_index_in_dim(buffer, a, slot, 0), tree, value)


def zeros(shape: tuple[int, ...], like: Array, axis: str) -> Array:
    """Zeros that vary over the ranks as `like` does, and over the stages."""
    axes = tuple({*varies_over(like), axis})
    return lax.pcast(jnp.zeros(shape, like.dtype), axes, to="varying")


def varying(x: Array, axis: str) -> Array:
    """An array that may differ from stage to stage."""
    return x if axis in varies_over(x) else lax.pcast(x, axis, to="varying")


@contextmanager
def named(phase: str) -> Iterator[None]:
    """The names that JAX gives to what it differentiates, for a profile and for the diff: here nothing gives them."""
    with jax.named_scope("transpose(jvp(pipeline))" if phase == "backward" else "jvp(pipeline)"):
        yield
