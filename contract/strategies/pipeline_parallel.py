"""Pipeline parallel (Huang et al., 1811.06965): the layers are split into stages, the batch into microbatches.

Forward: permute of activations, (B / m) D e bytes for each of m microbatches and each boundary between two parts of the
model on different stages. Backward: permute of their gradients, as many. The sends of one tick are one permute. GPipe's
order has m + n - 1 ticks each way, but no stage sends in the last one, so there are m + n - 2 permutes. In other
orders, what is sent in one tick follows from the schedule (`contract.messages.levels`), and in JAX, where all stages
run one program, from its rows (`contract.schedule_time.rows`). Under annotations a stage is a part of one shifted
buffer (GSPMD, 2105.04663, section 3.3), and each of the m + n - 1 ticks permutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from contract.kept import Kept
from contract.messages import levels, programs
from contract.problem import Problem, split_slices
from contract.schedule import Action, Parts, Schedule, num_chunks, parts_of
from contract.schedule_time import rows as ticks_of
from contract.share import HELD, Asked, Part, Sent, Share

AXIS = "pp"
UNIT = 1
DEPTH = 2
SPLITS = HELD
T = TypeVar("T")


def refusal(asked: Asked, n: int) -> str | None:
    """Every chunk of a stage needs a layer, or a pair of layers, and every microbatch needs a sample."""
    layers, each = asked.problem.depth // asked.unit, num_chunks(asked.schedule, asked.chunks)
    if layers < (needed := n * each):
        of = "blocks" if asked.problem.unit == 2 else "layers" if asked.unit == 1 else "pairs of layers"
        what = f"{n} stages" if each == 1 else f"{n} stages of {each} chunks"
        return f"pipeline_parallel over {what} needs at least {needed} {of}, got {layers}"
    if asked.microbatches > asked.rows:
        m, of_rank = asked.microbatches, " on every rank" if asked.rows < asked.problem.batch else ""
        return f"{m} microbatches need a batch of at least {m}{of_rank}, got {asked.rows}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every stage works on the whole batch."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """A stage's layers, whole, if every stage holds one chunk. `unit` layers stay together."""
    return [part for chunk in chunks(parts, problem, n, index, unit, parts_of("gpipe", n)) for part in chunk]


def chunks(layers: Sequence[T], problem: Problem, n: int, index: int, unit: int, places: Parts) -> list[list[T]]:
    """The layers of each chunk of stage `index`. places: the (stage, chunk) of every part of the model."""
    pieces = split_slices(len(layers) // unit, len(places))
    mine = [(chunk, piece) for (stage, chunk), piece in zip(places, pieces, strict=True) if stage == index]
    return [list(layers[piece.start * unit : piece.stop * unit]) for _, piece in sorted(mine, key=lambda one: one[0])]


def communication(share: Share, n: int) -> Iterator[Sent]:
    """One permute for each tick in which a stage sends, as large as the largest microbatch sent in it; and the loss."""
    rows, width, m = share.microbatches, share.features, len(share.microbatches)
    if share.derived:
        edges, ticks = tuple((s, s + 1) for s in range(n - 1)), m + n - 1
        back = tuple((b, a) for a, b in edges)
        op, size = "collective_permute", max(rows) * width
        yield Sent(op, size, "forward", "activations of every tick", edges=edges, times=ticks)
        yield Sent(op, size, "backward", "gradients of every tick", edges=back, tick=1, times=ticks)
        yield share.loss()
        return
    assert share.schedule is not None
    number = 0
    for phase, what in (("forward", "activations"), ("backward", "gradients")):
        sent = permutes(share.schedule, phase, share.by_ticks)
        for tick, together in enumerate(each for ticks in sent.values() for each in ticks):
            most = max(rows[action.microbatch] for action in together)
            edges = tuple(sorted(edge(share.schedule, action) for action in together))
            yield Sent("collective_permute", most * width, phase, f"{what} of tick {tick}", None, edges, number)
            number += 1
    yield share.loss()


def permutes(schedule: Schedule, phase: str, by_ticks: bool = False) -> dict[int, list[list[Action]]]:
    """What is sent forward or backward, by the ticks in which something is: the actions whose results are one permute.

    A permute gives each rank at most one message, so what exceeds that is a permute of its own.
    """
    if by_ticks:
        timed: Iterable[tuple[int, Action]] = [
            (tick, action) for tick, row in enumerate(ticks_of(schedule)) for action in row if action is not None
        ]
    else:
        timed = levels(schedule, programs(schedule))
    found: dict[int, list[list[Action]]] = {}
    for tick, action in timed:
        target = schedule.target(action)
        if target is None or target.stage == action.stage or (action.kind == "forward") != (phase == "forward"):
            continue
        of_tick = found.setdefault(tick, [[]])
        if target.stage in [edge(schedule, each)[1] for each in of_tick[-1]]:
            of_tick.append([])
        of_tick[-1].append(action)
    return {tick: [sorted(together) for together in found[tick]] for tick in sorted(found)}


def edge(schedule: Schedule, action: Action) -> tuple[int, int]:
    """From the stage of an action to the one that needs its result."""
    target = schedule.target(action)
    assert target is not None
    return action.stage, target.stage


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """Of a microbatch a stage keeps what a single device keeps of its layers. The schedule says how many at a time."""
    return list(tensors)
