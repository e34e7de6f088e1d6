"""The proof of the planner: every mesh at every rate, predicted first, then run over links of that rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations
from statistics import median
from typing import Any

from benchmarks.documents import resume
from benchmarks.lab.lab import Lab, open_lab
from benchmarks.lab.namespaces import GOODPUT, Shape
from benchmarks.plan.plan import mesh_document
from benchmarks.plan.prove import calibrate
from benchmarks.plan.prove.steps import Measured, Paced
from benchmarks.plan.prove.summary import summary
from contract import reference
from contract.axes import USUAL, Axis
from contract.planner.instructions import Begin, Send
from contract.planner.predict import Prediction, predict
from contract.planner.program import step
from contract.planner.search import factored
from contract.problem import Problem
from contract.strategy import Run
from shardiff.record import wire_factor
from shardiff.system import machine as here

Document = dict[str, Any]
Alike = tuple[Problem, tuple[tuple[str, int], ...]]  # a problem, and the axes of a mesh by name
SMALL_TALK = 30_000  # bytes of barriers and acknowledgements in a step
BYTES_OFF = 0.05
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Campaign:
    """What to prove. rates: bit/s. meshes: `dp=2,tp=2`; every one that can work if empty. paced: None: the real CPU.

    in_turn: the problems take the rates in turn, instead of every problem at every rate. inside: bit/s of a rank's own
    link where there are several hosts; None: not shaped. claim: what these configurations are to show.
    """

    shapes: tuple[Shape, ...] = (Shape(1, 2), Shape(1, 4), Shape(2, 2))
    rates: tuple[float, ...] = (5e6, 10e6, 20e6, 50e6)
    problems: tuple[Problem, ...] = (Problem(128, 256, 4), Problem(1024, 128, 4))
    meshes: tuple[str, ...] = ()
    # Slow, and small problems, so that what Python and gloo take of the CPU is little of a step
    paced: Paced | None = Paced(1e8, 2e8)
    iterations: int = 3
    microbatches: int = 4
    in_turn: bool = False
    inside: float | None = None
    claim: str = ""

    def cases(self) -> list[tuple[float, Problem]]:
        """Every rate with the problems that are run at it."""
        each, step = list(enumerate(self.problems)), len(self.problems) if self.in_turn else 1
        return [(rate, problem) for i, rate in enumerate(self.rates) for j, problem in each if (i - j) % step == 0]

    def runs(self, shape: Shape, problem: Problem) -> list[Run]:
        """Every mesh of the usual strategies in every order of its axes that matters on this shape."""
        found: dict[str, Run] = {}
        for sizes in factored(shape.ranks, len(USUAL)):
            used = [(name, size) for name, size in zip(USUAL, sizes, strict=True) if size > 1]
            for order in permutations(used) if shape.hosts > 1 else [tuple(sorted(used, key=lambda one: one[0]))]:
                axes = tuple(Axis(name, size, USUAL[name]) for name, size in order)
                try:
                    run = Run("torch", axes, problem, steps=1, microbatches=self.microbatches, device="cpu")
                except ValueError:
                    continue
                if not self.meshes or str(run.mesh) in self.meshes:
                    found[str(run.mesh)] = run
        return list(found.values())


def prove(
    campaigns: Sequence[Campaign],
    save: Callable[[Document], object] = lambda document: None,
    starting: Callable[[str], object] = lambda what: None,
) -> Document:
    """The document. save: called with it whenever it has grown. Raises LabError, or ValueError for a failed check.

    All campaigns run on the device of the first.
    """
    campaign = campaigns[0]
    document: Document = {
        "kind": "plan_proof",
        "schema": 2,
        "machine": here.facts(),
        "settings": {
            "paced": campaign.paced._asdict() if campaign.paced else None,
            "rates_bits_per_second": sorted({rate for each in campaigns for rate in each.rates}),
            "iterations": campaign.iterations,
        },
        "complete": False,
        "runs": [],
        "labs": [],
        "configurations": [],
        "summary": None,
    }
    overheads: dict[Alike, float] = {}
    resume.begin(document, None)
    for shape in dict.fromkeys(shape for each in campaigns for shape in each.shapes):
        starting(f"{shape}: namespaces, links, and gloo's collectives")
        with open_lab(shape) as lab:
            here_run = [each for each in campaigns if shape in each.shapes]
            rates = [rate for each in here_run for rate in each.rates]
            gloo = calibrate.measure(lab, math.prod(rates) ** (1 / len(rates)), here_run[0].inside)
            for each in here_run:
                of_lab(each, lab, gloo, overheads, document, save, starting)
    document["complete"] = True
    save(document)
    return document


def of_lab(
    campaign: Campaign,
    lab: Lab,
    gloo: calibrate.Gloo,
    overheads: dict[Alike, float],
    document: Document,
    save: Callable[[Document], object],
    starting: Callable[[str], object],
) -> None:
    """All configurations of one shape: predict all, then run all.

    overheads: what is known of steps that send nothing, which take as long on as many ranks of another shape.
    """
    shape, paced = lab.shape, campaign.paced
    inside = campaign.inside if shape.hosts > 1 else None
    flops = {problem: 0.0 if paced else calibrate.real_rate(lab, problem) for problem in campaign.problems}
    runs = [run for problem in campaign.problems for run in campaign.runs(shape, problem)]
    for run in runs:
        if alike(run) not in overheads:
            starting(f"{shape}: a step that sends nothing: {run.mesh}, batch {run.problem.batch}")
            overheads[alike(run)] = calibrate.unhidden(lab, paced, run, flops[run.problem])
    document["labs"].append(
        {
            "shape": str(shape),
            **gloo.to_json(),
            "unhidden": [
                {"mesh": dict(axes), "batch": problem.batch, "width": problem.width, "seconds": seconds}
                for (problem, axes), seconds in overheads.items()
                if (problem, axes) in map(alike, runs)
            ],
            "flops_per_second": [rate for rate in flops.values() if rate],
        }
    )
    todo: list[tuple[float, Run, Prediction]] = []
    now, commit = datetime.now(UTC).isoformat(timespec="seconds"), here.commit()
    first = len(document["configurations"])
    for rate, problem in campaign.cases():
        for run in campaign.runs(shape, problem):
            where = calibrate.machine(shape, rate, gloo, paced, flops[problem], overheads[alike(run)], inside)
            found = predict(run, where)
            todo.append((rate, run, found))
            document["configurations"].append(
                {
                    "shape": str(shape),
                    "rate_bits_per_second": rate,
                    "inside_bits_per_second": inside,
                    "claim": campaign.claim,
                    "batch": problem.batch,
                    "width": problem.width,
                    "layers": problem.layers,
                    "predicted": {**mesh_document(found, found), "commit": commit, "date": now},
                    "measured": None,
                }
            )
    save(document)
    wanted: dict[Problem, list[Any]] = {}
    seen: set[tuple[object, ...]] = set()
    shaped_at = None
    for (rate, run, _), entry in zip(todo, document["configurations"][first:], strict=True):
        starting(f"{shape}, {rate / 1e6:g} Mbit/s: {run.mesh}, batch {run.problem.batch}")
        if rate != shaped_at:
            lab.rates(rate if shape.hosts == 1 else inside, rate)
            entry["stream_of_rate"], shaped_at = calibrate.check_rate(lab, rate), rate
        expected = None
        if (run.axes, run.problem) not in seen:
            seen.add((run.axes, run.problem))
            if run.problem not in wanted:
                wanted[run.problem] = [tuple(layer) for layer in reference.run(replace(run, steps=1)).params]
            expected = wanted[run.problem]
        for again in (True, False):
            answers = lab.call(calibrate.STEPS, "steps", run, paced, campaign.iterations, False, expected)
            if not (again and unplanned(run, answers, gloo)):  # TCP may send segments again, but not every time
                break
        entry["measured"] = measured(run, answers, gloo)
        document["summary"] = summary(document["configurations"])
        resume.measured(document, f"{shape}, {rate / 1e6:g} Mbit/s, {run.mesh}, {run.problem.batch}")
        save(document)


def alike(run: Run) -> Alike:
    """What runs have in common that do the same in a step that sends nothing."""
    return run.problem, tuple(sorted(run.mesh.axes))


def unplanned(run: Run, answers: Sequence[Measured], gloo: calibrate.Gloo) -> str | None:
    """The first rank that has sent other bytes than planned, in one line; None if there is none."""
    for rank, one in enumerate(answers):
        plan = bytes_of(run, rank, gloo)
        if abs(one.sent - plan) > BYTES_OFF * plan + SMALL_TALK:
            return f"{run.mesh}: rank {rank} has sent {one.sent:,} bytes in a step, planned {plan:,.0f}"
    return None


def measured(run: Run, answers: Sequence[Measured], gloo: calibrate.Gloo) -> Document:
    """What the ranks found, judged: values against the reference, bytes against the plan.

    Raises ValueError for a wrong value or for bytes that no plan explains.
    """
    each, flagged = calibrate.undisturbed(answers), sum(answers[0].flagged)
    worst = max((one.difference for one in answers if not math.isnan(one.difference)), default=None)
    if worst is not None and worst > TOLERANCE:
        raise ValueError(f"{run.mesh}: a rank's parameters differ from the reference's by {worst:.1e}")
    if wrong := unplanned(run, answers, gloo):
        raise ValueError(wrong)
    planned = [bytes_of(run, rank, gloo) for rank in range(run.world_size)]
    return {
        "seconds": median(each),
        "samples": each,
        "flagged": flagged,
        "kept_flagged": flagged == len(answers[0].seconds),
        "sent_bytes": [one.sent for one in answers],
        "planned_bytes": [round(plan) for plan in planned],
        "difference": worst,
        "memory_bytes": max(sum(one.held.values()) for one in answers),
        "memory": max((one.held for one in answers), key=lambda held: sum(held.values())),
    }


def bytes_of(run: Run, rank: int, gloo: calibrate.Gloo) -> float:
    """Bytes that a rank's interface must send in a step: what gloo sends for each collective, with the headers."""
    total = 0.0
    of = calibrate.machine(Shape(1, run.world_size), 1e9, gloo, Paced(1e9, 1e9)).device
    for one in step(run, rank, of):
        if isinstance(one, Begin):
            n = run.mesh.size_of(one.axis)
            known = {ranks: ratio for (op, ranks), ratio in gloo.sent.items() if op == one.op}
            ratio = known.get(n, known[min(known, key=lambda ranks: abs(ranks - n))]) if known else 1.0
            total += one.payload * float(wire_factor(one.op, n)) * ratio
        elif isinstance(one, Send):
            total += one.size
    return total / GOODPUT
