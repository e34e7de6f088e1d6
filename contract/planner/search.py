"""All meshes of a machine, ranked by the time of a step.

A mesh is every way to write the number of devices as a product over the axes of `contract.axes.USUAL`, in every
order of the axes that puts their groups on other hosts. Simulating all of them would take minutes for a thousand
devices, so every mesh first gets a lower bound: its compute and what it must wait for at once, on links that nobody
disturbs. Meshes are simulated in the order of their bounds until no bound is below the last time that is asked for.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations, product

from contract.axes import AXES, USUAL, Axes, Axis
from contract.planner.bounds import Stage, replayed, rough, stage_of, stages_of
from contract.planner.places import Placement, placement, spread
from contract.planner.predict import Prediction, most_memory, predict, total
from contract.problem import Problem
from contract.strategy import Run
from shardiff.cost import Network
from shardiff.devices import Machine

MOST_AXES = 4
ORDER = ("pp", "dp")  # outermost first, before all others: the order that is kept where several are alike


@dataclass(frozen=True)
class Asked:
    """What to plan for. strategies: for axes that should not have their usual one. microbatches: of a pipeline; if
    empty, as many as it has stages, twice and four times as many. schedules: of a pipeline."""

    problem: Problem
    optimizer: str = "adamw"
    strategies: tuple[str, ...] = ()
    microbatches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ("gpipe",)


@dataclass
class Candidate:
    """A run that can work. first: what its first stage does. placed: where it lies. needs: bytes of the device that
    needs most. stages: what all of its stages do, once that was needed."""

    run: Run
    first: Stage
    placed: Placement
    needs: int
    stages: list[Stage] = field(default_factory=list)

    def rough(self, network: Network) -> float:
        """Seconds that a step takes at least, from the first stage alone."""
        return rough(self.run, self.first, self.placed, network)

    def replayed(self, machine: Machine, known: dict[tuple[object, ...], list[Stage]]) -> float:
        """Seconds that a step of a pipeline takes at least, from a replay of its schedule.

        known: the stages of runs whose axes differ in their order alone, which is where they lie and not what they do.
        """
        key = (*sorted(self.run.axes), self.run.microbatches, self.run.schedule)
        if not self.stages and key not in known:
            known[key] = stages_of(self.run, machine, self.placed.ranks)
        self.stages = self.stages or known[key]
        return replayed(self.run, self.stages, self.placed, machine.network, with_bubble=False).seconds


@dataclass(frozen=True)
class Ranking:
    """best: the meshes that fit, fastest first. too_large: those that do not, in the order of their bounds. others: how
    many more fit, all of them slower. refused: how many cannot work."""

    best: list[Prediction]
    too_large: list[Candidate]
    others: int
    refused: int

    @property
    def num_meshes(self) -> int:
        return len(self.best) + len(self.too_large) + self.others


def factored(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of so many factors, in every order."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factored(number // first, parts - 1))


def sizes(devices: int, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Axis -> size for every mesh of at most MOST_AXES axes, without axes of one rank."""
    for shape in factored(devices, len(names)):
        used = {name: size for name, size in zip(names, shape, strict=True) if size > 1}
        if len(used) <= MOST_AXES:
            yield used or {names[0]: 1}


def orders(used: Mapping[str, int], network: Network) -> Iterator[tuple[str, ...]]:
    """The orders of the axes that put some group on other hosts than all orders before."""
    seen: set[tuple[int, ...]] = set()
    names = sorted(used, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    for order in permutations(names):
        strides, stride = {}, 1
        for name in reversed(order):
            strides[name] = stride
            stride *= used[name]
        where = tuple(spread(used[name], strides[name], network.devices).hosts for name in names)
        if where not in seen:
            seen.add(where)
            yield order


def candidates(
    machine: Machine, asked: Asked, only: Collection[tuple[object, ...]] | None = None
) -> tuple[list[Candidate], int]:
    """Every run that can work, and the number of meshes that cannot.

    only: (axes, microbatches, schedule) of those to look at.
    """
    chosen = USUAL | {str(AXES[strategy]): strategy for strategy in asked.strategies}
    found, refused = [], 0
    for used in sizes(machine.network.size, tuple(chosen)):
        first: dict[
            str, tuple[Stage, int, int]
        ] = {}  # schedule -> of the fewest microbatches: stage, their number, bytes
        placings = list(orders(used, machine.network))
        for microbatches, schedule in pipelines(used.get("pp", 1), asked):
            for order in placings:
                axes = tuple(Axis(name, used[name], chosen[name]) for name in order)
                if only is not None and (axes, microbatches, schedule) not in only:
                    continue
                run = run_of(asked, axes, microbatches, schedule)
                if run is None:
                    refused += 1
                    break
                placed = placement(run, machine.network)
                if schedule not in first:
                    first[schedule] = stage_of(run, 0, machine), microbatches, total(most_memory(run, placed.ranks))
                stage, fewest, needs = first[schedule]
                if microbatches != fewest:  # less than in proportion to its rows, as weights are read all the same
                    stage = stage.scaled(fewest / microbatches)
                    needs = needs if schedule == "gpipe" else total(most_memory(run, placed.ranks))
                found.append(Candidate(run, stage, placed, needs))
    return found, refused


def pipelines(stages: int, asked: Asked) -> Iterator[tuple[int, str]]:
    """Microbatches and schedules for a pipeline of so many stages."""
    counts = sorted(asked.microbatches) or [stages * times for times in (1, 2, 4)]
    yield from product(counts, asked.schedules) if stages > 1 else [(1, "gpipe")]


def run_of(asked: Asked, axes: Axes, microbatches: int, schedule: str) -> Run | None:
    """The run of these axes; None if it cannot work."""
    try:
        return Run(
            axes=axes,
            problem=asked.problem,
            optimizer=asked.optimizer,
            microbatches=microbatches,
            schedule=schedule,
        )
    except ValueError:
        return None


def rank(machine: Machine, asked: Asked, most: int = 10) -> Ranking:
    """The `most` fastest meshes that fit. Raises ValueError if no mesh can work."""
    with uncollected():
        found, refused = candidates(machine, asked)
        if not found:
            size = machine.network.size
            raise ValueError(f"no mesh of {size} devices can work for these sizes; {refused} were refused")
        return ranked(found, machine, refused, most)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile, which takes a third of the time of thousands of meshes and finds nothing.

    What was made counts as old afterwards, so that the first collection that follows does not look at all of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def ranked(found: Sequence[Candidate], machine: Machine, refused: int, most: int) -> Ranking:
    """The same of these candidates."""
    fit = [one for one in found if one.needs <= machine.device.memory]
    best = fastest(fit, machine, most)
    too_large = [one for one in found if one.needs > machine.device.memory]
    too_large.sort(key=lambda one: one.rough(machine.network))
    return Ranking(best, too_large, len(fit) - len(best), refused)


def fastest(found: Sequence[Candidate], machine: Machine, most: int) -> list[Prediction]:
    """The `most` fastest of candidates, fastest first: simulated until all other bounds are above."""
    best: list[Prediction] = []
    known: dict[tuple[object, ...], list[Stage]] = {}
    waiting = [(one.rough(machine.network), index, False) for index, one in enumerate(found)]
    heapq.heapify(waiting)
    while waiting:
        least, index, exactly = heapq.heappop(waiting)
        if len(best) >= most and least >= best[-1].seconds:
            break
        one = found[index]
        if not exactly and len(one.placed.ranks) > 1:
            heapq.heappush(waiting, (max(least, one.replayed(machine, known)), index, True))
            continue
        best = sorted([*best, predict(one.run, machine, one.stages)], key=lambda each: each.seconds)[:most]
    return best
