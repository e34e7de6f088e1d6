"""The closed form of communication: what each rank must send in one training step, derived from the sizes alone.

B is the batch, D the width, L the number of layers, n the number of ranks, e the bytes of an element, and m the number
of microbatches. The loss is summed in float32 at least, so it is a scalar of four bytes in float32 and bfloat16 runs
and of eight bytes in float64 runs.

The formula of each strategy is in its file in `contract.strategies`; this module combines the axes of a mesh. The inner
axes reduce what the outer ones send, and the outer axes reduce what the inner ones work on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from contract import strategies
from contract.axes import Axis
from contract.layout import share
from contract.problem import BYTES
from contract.share import Sent
from contract.strategy import Run
from shardiff.record import Executions, Record, record

OF_PARAMETERS = re.compile(r"(gradient of )?\w+\d(?: and \w+\d)*")  # by their names, as of w3 and b3


def communication(run: Run) -> list[Record]:
    """The records of one step of `run`, those of the innermost axis first. An axis of one rank sends nothing.

    All groups of an axis send at the same time. What they send in the same turn is one record, whose payload is that of
    the largest group, so totals over the records are those of the busiest rank. A record's `detail` names what the
    groups send.
    """
    return [each for axis in reversed(run.axes) if axis.size > 1 for each in _of_axis(run, axis)]


def _of_axis(run: Run, axis: Axis) -> list[Record]:
    found: dict[tuple[object, ...], Record] = {}
    for group in run.mesh.groups(axis.name):
        times: Counter[Record] = Counter()
        for sent in _sent(run, axis, group):
            new = _record(run, axis, group, sent)
            each = replace(new, groups=None, detail=None)
            if new.edges:
                key: tuple[object, ...] = (sent.tick,)
            else:
                times[each] += 1
                key = (each, times[each])
            found[key] = _join(found[key], new) if key in found else new
    return list(found.values())


def _sent(run: Run, axis: Axis, group: tuple[int, ...]) -> Iterator[Sent]:
    """What a group sends; with blocks that are run again, what these send a second time."""
    for sent in strategies.of(axis.strategy).communication(share(run, group[0]), axis.size):
        yield sent
        if sent.again and run.recompute == "block":
            yield sent._replace(phase="backward", tick=-1 - sent.tick)


def _record(run: Run, axis: Axis, group: tuple[int, ...], sent: Sent) -> Record:
    dtype, named = sent.dtype or run.problem.dtype, OF_PARAMETERS.fullmatch(sent.detail)
    moves = ("gradient" if named[1] else "parameter") if named else None if sent.detail == "loss" else "activation"
    return record(
        sent.op,
        dtype,
        sent.elements * BYTES[dtype],
        None if sent.edges else axis.size,
        axis=axis.name,
        groups=None if sent.edges else (group,),
        edges=tuple((group[a], group[b]) for a, b in sent.edges) or None,
        phase=sent.phase,
        detail=sent.detail,
        moves=moves,
        executions=Executions(sent.times, sent.times),
    )


def _join(a: Record, b: Record) -> Record:
    """Combine the records of two groups that send at the same time."""
    details = dict.fromkeys([*(a.detail or "").split(", "), *(b.detail or "").split(", ")])
    return replace(
        max(a, b, key=lambda one: one.payload_bytes),
        groups=(*a.groups, *b.groups) if a.groups and b.groups else None,
        edges=tuple(sorted((*a.edges, *b.edges))) if a.edges and b.edges else None,
        detail=", ".join(details),
    )
