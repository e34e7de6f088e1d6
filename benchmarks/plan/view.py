"""A plan for people: the ranked meshes, the crossovers, and what would help most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks import terminal
from benchmarks.plan.plan import Plan, close, label
from benchmarks.plan.priced import Compiled
from benchmarks.words import counted, duration
from contract.planner.crossings import Crossing
from contract.planner.predict import STATED_ERROR, Prediction, total
from shardiff.devices import Machine
from shardiff.system.words import size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN_TOO_LARGE = 3


def parts(answer: Plan) -> Iterator[RenderableType]:
    """All that is printed."""
    yield heading(answer)
    if answer.ranking.best:
        yield table(answer)
    yield from notes(answer)
    yield from crossovers(answer)
    yield from gains(answer)
    yield from sources(answer)


def heading(answer: Plan) -> str:
    """What was planned for."""
    machine, problem, network = answer.machine, answer.asked.problem, answer.machine.network
    rate = machine.device.rate(problem.dtype)
    between = f", {rate_text(network.between.bandwidth)} between hosts" if network.hosts > 1 else ""
    return (
        f"{machine}: {flops_text(rate)} in {problem.dtype}, {size(machine.device.memory)} of memory, "
        f"{rate_text(network.inside.bandwidth)} inside a host{between}\n"
        f"batch {problem.batch:,}, width {problem.width:,}, {counted(problem.layers, 'layer')}, {problem.dtype}, "
        f"{answer.asked.optimizer}"
    )


def table(answer: Plan) -> Table:
    """The meshes, fastest first. The parts of a step are those of the rank that is done last, and add up to it."""
    best = answer.ranking.best
    axes = [axis for axis in ("pp", "dp", "fsdp", "tp") if any(one.exposed.get(axis, 0.0) > 0 for one in best)]
    axes += sorted({axis for one in best for axis in one.exposed if axis not in axes and one.exposed[axis] > 0})
    numbers = ["step", "compute", "bubble", *(f"waits\n{axis}" for axis in axes), "update", "memory"]
    made = terminal.table(["mesh", ""], numbers, gap=2)
    for one in best:
        cells = [one.seconds, one.compute, one.bubble, *(one.exposed.get(axis, 0.0) for axis in axes)]
        texts = [duration(value) if value else "-" for value in (*cells, one.update + one.overhead)]
        made.add_row(
            label(one.run).replace(" microbatches", " mb"), verdict(one, best[0]), *texts, size(total(one.memory))
        )
    return made


def verdict(one: Prediction, best: Prediction) -> str:
    """How a mesh compares with the fastest."""
    if one is best:
        return "fastest"
    if close(one, best):
        return "too close to call"
    return f"+{100 * (one.seconds / best.seconds - 1):.0f} %"


def notes(answer: Plan) -> Iterator[str]:
    """What the table does not show."""
    ranking = answer.ranking
    yield (
        "waits: for communication along an axis that nothing hides; bubble: for other stages; mb: microbatches; too "
        f"close to call: within the stated error of {100 * STATED_ERROR:.0f} %"
    )
    if ranking.others:
        yield f"{counted(ranking.others, 'other mesh fits and is', 'other meshes fit and are')} slower"
    if ranking.too_large:
        needs = "; ".join(f"{label(one.run)} needs {size(one.needs)}" for one in ranking.too_large[:SHOWN_TOO_LARGE])
        count = counted(len(ranking.too_large), "mesh does not fit", "meshes do not fit")
        yield f"{count} into {size(answer.machine.device.memory)}: {needs}" + (
            ", ..." if len(ranking.too_large) > SHOWN_TOO_LARGE else ""
        )
    if ranking.refused:
        yield f"{counted(ranking.refused, 'mesh', 'meshes')} cannot work with these sizes"


def crossovers(answer: Plan) -> Iterator[str]:
    """Where another mesh becomes the fastest."""
    where = "links between hosts" if answer.level == "between" else "links inside a host"
    for name, found, form in (
        (f"over the rate of the {where}", answer.links, rate_text),
        ("over the batch", answer.batch, batch_text),
    ):
        if found is None:
            continue
        if not found:
            yield f"\n{name}, the same mesh stays the fastest"
            continue
        yield f"\n{name}, the fastest mesh is"
        yield from (f"  {line}" for line in chain(found, form))
    if answer.links is None and len(answer.ranking.best) > 1:
        yield "crossovers: add --crossovers, which takes some seconds for so many meshes"


def chain(found: list[Crossing], form) -> Iterator[str]:
    """One line for each interval."""
    low = None
    for one in found:
        interval = f"up to {form(one.at)}" if low is None else f"{form(low)} to {form(one.at)}"
        yield f"{interval}: {label(one.before)}"
        low = one.at
    assert low is not None
    yield f"above {form(low)}: {label(found[-1].after)}"


def gains(answer: Plan) -> Iterator[str]:
    """What would help the fastest mesh most."""
    if not answer.gains:
        return
    best = answer.ranking.best[0]
    order = sorted(answer.gains.items(), key=lambda item: item[1])
    faster = "; ".join(f"{NAMES[name]} {100 * (1 - value / best.seconds):.0f} %" for name, value in order)
    yield f"\nthe fastest mesh would need less time for as many samples with {faster}"


NAMES = {
    "links inside a host": "links inside a host twice as fast:",
    "links between hosts": "links between hosts twice as fast:",
    "latency": "half the latency:",
    "compute": "compute twice as fast:",
    "memory bandwidth": "memory twice as fast:",
    "batch": "twice the batch:",
}


def sources(answer: Plan) -> Iterator[str]:
    """Where the figures of the devices are from."""
    found = dict.fromkeys((*answer.machine.device.sources, answer.machine.links_source))
    yield "\nsources: " + "; ".join(source for source in found if source)


def compiled(found: Sequence[Compiled], machine: Machine) -> Iterator[RenderableType]:
    """What XLA derives for the first meshes, beside the closed form."""
    if not found:
        yield "none of the first meshes can be written as annotations"
        return
    yield (
        f"\nwhat XLA derives for {found[0].target}, priced without overlap: products, then one collective after another"
        "; ratio: to the closed form"
    )
    numbers = ["GFLOP", "ratio", "a rank sends", "ratio", "communication", "ratio", "sum", "ratio"]
    made = terminal.table(["mesh"], numbers, gap=2)
    for one in found:
        a, b, rate = one.closed, one.derived, machine.device.rate(one.run.problem.dtype)
        communication = sum(a.communication.values()), sum(b.communication.values())
        pairs = (
            (f"{b.flops / 1e9:.4g}", b.flops, a.flops),
            (size(b.wire_bytes), b.wire_bytes, a.wire_bytes),
            (duration(communication[1]), communication[1], communication[0]),
            (duration(b.seconds(rate)), b.seconds(rate), a.seconds(rate)),
        )
        cells = [cell for text, mine, theirs in pairs for cell in (text, f"{mine / theirs:.2f}" if theirs else "-")]
        made.add_row(label(one.run), *cells)
    yield made


def rate_text(bandwidth: float) -> str:
    """Bytes/s, as 50 GB/s; below 1 GB/s in bits, as networks are sold."""
    return f"{size(bandwidth)}/s" if bandwidth >= 1e9 else f"{8 * bandwidth / 1e6:.4g} Mbit/s"


def batch_text(batch: float) -> str:
    return f"{batch:,.0f}"


def flops_text(rate: float) -> str:
    """770 TFLOP/s."""
    return f"{rate / 1e12:.4g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.4g} GFLOP/s"
