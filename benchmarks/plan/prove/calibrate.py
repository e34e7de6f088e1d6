"""The machine that a lab is, as the planner takes it: links of stated rates, gloo's collectives as measured.

Only streams and single collectives are measured for it, and one step that sends nothing; no step whose time is to be
predicted goes in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.lab.lab import Lab
from benchmarks.lab.namespaces import GOODPUT, WINDOW, Shape, burst_of
from benchmarks.plan.prove.steps import Measured, Paced
from contract.axes import one_axis
from contract.planner.predict import computed
from contract.problem import Problem
from contract.strategy import Run
from shardiff import cost
from shardiff.cost import Link, Network
from shardiff.devices import Device, Machine
from shardiff.record import wire_factor

TRAFFIC, STEPS = "benchmarks.lab.traffic", "benchmarks.plan.prove.steps"  # modules that ranks call
OPS = ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
THREADS = 2  # of a gloo group, which run its collectives
ROUNDS = {"all_reduce": 2, "reduce_scatter": 2}  # gloo's: a sum, and then the gathering of it
SIZES = (1 << 17, 1 << 20)  # bytes, as a step has them; in between gloo's times lie up to 10 % beside a line
RATE = 100e6  # bit/s, at which gloo's collectives are measured where nothing else is said
REPEATS, CALLS = 3, 20  # with bytes, and without
STREAMS = 5  # tries
SILENT_STEPS = 3
MOST_OFF = 0.05  # by which the rate of a stream may differ from the stated one


@dataclass(frozen=True)
class Gloo:
    """What gloo does on so many ranks. fast: bytes/s of an unshaped link; collectives: (op, ranks) -> latency and
    overhead in time; sent: (op, ranks) -> bytes on the interface over the optimal ones."""

    fast: float
    collectives: Mapping[tuple[str, int], cost.Measured]
    sent: Mapping[tuple[str, int], float]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "unshaped_bytes_per_second": self.fast,
            "collectives": [
                {
                    "op": op,
                    "ranks": ranks,
                    "latency": one.latency,
                    "overhead": one.overhead,
                    "bytes_over_optimal": self.sent[op, ranks],
                }
                for (op, ranks), one in self.collectives.items()
            ],
        }


def goodput(rate: float) -> float:
    """Bytes/s that TCP carries on a link of so many bit/s."""
    return rate / 8 * GOODPUT


def check_rate(lab: Lab, rate: float) -> float:
    """What a plain stream reaches of a link's stated rate. Raises ValueError where that is too far off.

    The links of the last rank are those that all shapes shape.
    """
    size, reached = max(1 << 20, int(rate / 8 * 0.25)), 0.0
    for _ in range(STREAMS):
        taken = max(lab.call(TRAFFIC, "stream", size, lab.shape.ranks - 1, 0))
        reached = (size - burst_of(rate)) / taken / goodput(rate)
        if abs(reached - 1) <= MOST_OFF:
            return reached
    raise ValueError(
        f"a plain stream reaches {reached:.2f} of a link of {rate / 1e6:g} Mbit/s in the last of {STREAMS} tries; is "
        "the machine busy?"
    )


def measure(lab: Lab, rate: float = RATE, inside: float | None = None) -> Gloo:
    """gloo's collectives over as many ranks as an axis can have, at a rate at which no CPU is short of time.

    Calls without bytes are made by all groups of an axis at once, as in the runs; links are measured with one group,
    because it follows from the simulation how groups share them. Links are those of the ranks on one host; or those
    between hosts, with those `inside`: a ring over fast and slow links is slower than its slow links allow.
    """
    counts = [n for n in range(2, lab.shape.ranks + 1) if lab.shape.ranks % n == 0]
    lab.rates(None, None)
    small = {(op, n): median(times(lab, op, 4096, n, CALLS)) for n in counts for op in OPS}
    large, more = (min(times(lab, "message", size, lab.shape.ranks)) for size in (1 << 20, 1 << 22))
    fast = 3 * (1 << 20) / max(more - large, 1e-6)
    lab.rates(rate if lab.shape.hosts == 1 else inside, rate)
    collectives, sent = {}, {}
    for op, n in small:
        name, factor = "message" if op == "collective_permute" else op, float(wire_factor(op, n))
        taken = [median(times(lab, name, size, n, alone=True)) for size in SIZES]
        overhead = (taken[1] - taken[0]) / (SIZES[1] - SIZES[0]) * goodput(rate) / factor
        answers = lab.call(TRAFFIC, "collective", name, SIZES[1], 1, n)
        sent[op, n] = max(each[1] for each in answers) * GOODPUT / (SIZES[1] * factor)
        collectives[op, n] = cost.Measured(small[op, n], max(overhead, 1.0), sent[op, n], ROUNDS.get(op, 1))
    return Gloo(fast, collectives, sent)


def times(lab: Lab, op: str, size: int, ranks: int, repeats: int = REPEATS, alone: bool = False) -> list[float]:
    """Seconds of each call, each as long as its slowest rank. alone: one group calls, and not all of them at once."""
    answers = lab.call(TRAFFIC, "collective", op, size, repeats, ranks, alone)
    return [max(each[0][i] for each in answers) for i in range(repeats)]


def machine(
    shape: Shape,
    rate: float,
    gloo: Gloo,
    paced: Paced | None,
    flops: float = 0.0,
    overhead: float = 0.0,
    own: float | None = None,
) -> Machine:
    """The lab at one rate: of the ranks' own links on one host, of the links between hosts where there are several.

    own: the rate of a rank's own link there; None: not shaped. flops: of the real device, where it is not paced.
    """
    shaped = Link(goodput(rate), 0.0, burst_of(rate), WINDOW if shape.hosts > 1 else 0.0)
    fast = Link(gloo.fast) if own is None else Link(goodput(own), 0.0, burst_of(own))
    inside = shaped if shape.hosts == 1 else fast
    rates = {"float32": paced.flops if paced else flops}
    memory = paced.memory if paced else 1e15  # the real device's rate has the update in it
    device = Device("paced" if paced else "CPU", rates, 1e12, memory, roofline=False, overhead=overhead)
    network = Network(inside, shaped, shape.hosts, shape.devices, measured=dict(gloo.collectives), together=THREADS)
    return Machine(device, network, f"a lab of {shape} ranks, {rate / 1e6:g} Mbit/s")


def real_rate(lab: Lab, problem: Problem) -> float:
    """flops/s of the real device, in a step that sends nothing: products, all that is between them, and the update."""
    run = Run("torch", one_axis("data_parallel", lab.shape.ranks), problem, steps=1, device="cpu")
    rows = -(-problem.batch // lab.shape.ranks)
    return (3 * problem.layers - 1) * 2 * rows * problem.width**2 / silent(lab, None, run)


def unhidden(lab: Lab, paced: Paced | None, run: Run, flops: float = 0.0) -> float:
    """Seconds of a step that are no products and no update: a step on groups that send nothing, less what it computes.

    In a pipeline no stage waits for another one then.
    """
    where = machine(lab.shape, 1e9, Gloo(1e9, {}, {}), paced, flops)
    return max(0.0, silent(lab, paced, run) - computed(run, where))


def silent(lab: Lab, paced: Paced | None, run: Run) -> float:
    """Seconds of the slowest rank in a step on groups that send nothing: the median of those that were not disturbed,
    or the quickest if all were."""
    answers = lab.call(STEPS, "steps", run, paced, SILENT_STEPS if paced else 3 * SILENT_STEPS, True)
    return (min if all(answers[0].flagged) else median)(undisturbed(answers))


def undisturbed(answers: Sequence[Measured]) -> list[float]:
    """Seconds of the slowest rank in each step that was not disturbed; in each step if all were."""
    slowest = [max(one.seconds[i] for one in answers) for i in range(len(answers[0].seconds))]
    good = [seconds for seconds, flagged in zip(slowest, answers[0].flagged, strict=True) if not flagged]
    return good or slowest
