"""What `shardiff plan` answers, as data: the ranked meshes, the crossovers, and what would help most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.documents.collectives import OPS, Collectives
from benchmarks.documents.results_io import parse_as
from contract.axes import STRATEGIES, parse_axes
from contract.planner.crossings import Crossing, over_batch, over_links, sensitivity, slow_level
from contract.planner.predict import STATED_ERROR, Prediction, predict, total
from contract.planner.search import Asked, Candidate, Ranking, candidates, pipelines, ranked, uncollected
from contract.strategy import Run
from shardiff import devices
from shardiff.cost import Measured
from shardiff.devices import Machine
from shardiff.system import machine as here
from shardiff.system.inputs import NotJson, read_json

QUICK = 200  # meshes, up to which the crossovers are found without being asked for
RATE = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "kbit": 1e3 / 8, "GB/s": 1e9, "MB/s": 1e6}


@dataclass(frozen=True)
class Plan:
    """The answer. links, batch: crossovers; None where they were not looked for. gains: what is doubled -> seconds."""

    machine: Machine
    asked: Asked
    ranking: Ranking
    links: list[Crossing] | None
    batch: list[Crossing] | None
    gains: dict[str, float]

    @property
    def level(self) -> str:
        """The links whose rate the crossovers are over."""
        return slow_level(self.machine)


def machine_of(text: str, links: Path | None = None, inside: str | None = None, between: str | None = None) -> Machine:
    """`h100:4x8`, or a file of a machine, `FILE.json` or `FILE.json:4x8`; with measured links and other rates.

    Raises ValueError, one line.
    """
    path, _, size = text.partition(".json:") if ".json:" in text else (text, "", "")
    if text.endswith(".json") or size:
        machine = devices.read(Path(path + ".json" if size else text))
        if size:
            found = re.fullmatch(r"(?:([1-9][0-9]{0,4})x)?([1-9][0-9]{0,4})", size)
            if not found:
                raise ValueError(f"a size is hosts x devices of each, such as 4x8, got {size!r}")
            machine = devices.sized(machine, int(found[1] or 1), int(found[2]))
    else:
        machine = devices.parse(text)
    if links is not None:
        machine = with_profile(machine, links)
    rates = {name: rate_of(rate) for name, rate in (("inside", inside), ("between", between)) if rate is not None}
    return replace(machine, network=machine.network.with_links(**rates)) if rates else machine


def rate_of(text: str) -> float:
    """Bytes/s of `25gbit`, `100mbit` or `50GB/s`. Raises ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z/]+)", text)
    if not found or found[2] not in RATE or not float(found[1]):
        raise ValueError(f"a rate is a number and a unit, such as 25gbit, 100mbit or 50GB/s, got {text!r}")
    return float(found[1]) * RATE[found[2]]


def with_profile(machine: Machine, path: Path) -> Machine:
    """The machine with links as `shardiff bench collectives --output FILE` measured them on one host.

    The bandwidth of a link is that of the fastest collective's wire bytes, and every collective's overhead is how much
    longer its own take: what the library sends beyond the optimal bytes, and what it cannot send both ways at once.
    """
    try:
        profile = parse_as(Collectives, read_json(path))
    except (NotJson, ValueError) as error:
        raise ValueError(f"{path}: not a result of shardiff bench collectives: {error}") from None
    fits = [
        fit
        for fit in profile.fits
        if fit.implementation == "torch" and fit.mode == "per_iteration" and fit.bus_beta_GBps and fit.ranks > 1
    ]
    if not fits:
        raise ValueError(f"{path}: no fit of torch's collectives; measure five sizes or more, on 2 ranks or more")
    fastest = max(fit.bus_beta_GBps or 0.0 for fit in fits)
    measured = {
        (OPS[fit.op], fit.ranks): Measured(fit.alpha_s, fastest / (fit.bus_beta_GBps or fastest)) for fit in fits
    }
    inside = replace(machine.network.inside, bandwidth=1e9 * fastest)
    network = replace(machine.network, inside=inside, measured=measured)
    return replace(machine, network=network, links_source=f"{path}, measured on {profile.machine.summary()}")


def plan(
    machine: Machine,
    asked: Asked,
    meshes: Sequence[str] = (),
    most: int = 10,
    crossovers: bool | None = None,
) -> Plan:
    """The answer. meshes: those to look at; all, if empty. crossovers: None: where they are found in no time.

    Raises ValueError, one line, for what cannot be planned.
    """
    with uncollected():
        return _plan(machine, asked, meshes, most, crossovers)


def _plan(machine: Machine, asked: Asked, meshes: Sequence[str], most: int, crossovers: bool | None) -> Plan:
    machine.device.rate(asked.problem.dtype)
    for strategy in asked.strategies:
        if strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {strategy!r}; known: {', '.join(STRATEGIES)}")
    if meshes:
        runs = [run for mesh in meshes for run in runs_of(mesh, asked, machine)]
        found, refused = candidates(machine, asked, {(run.axes, run.microbatches, run.schedule) for run in runs})
        missing = [run for run in runs if not any(one.run.axes == run.axes for one in found)]
        best = [predict(run, machine) for run in missing]
        ranking = ranked(found, machine, refused, max(most, len(found))) if found else Ranking([], [], 0, 0)
        fit = sorted([*ranking.best, *(one for one in best if one.fits)], key=lambda one: one.seconds)
        ranking = replace(ranking, best=fit, refused=0)
    else:
        found, refused = candidates(machine, asked)
        if not found:
            size = machine.network.size
            raise ValueError(f"no mesh of {size} devices can work for these sizes; {refused} were refused")
        ranking = ranked(found, machine, refused, most)
    fit_ones = [one for one in found if one.needs <= machine.device.memory]
    wanted = len(found) <= QUICK if crossovers is None else crossovers
    several = wanted and len(fit_ones) > 1
    return Plan(
        machine,
        asked,
        ranking,
        over_links(fit_ones, machine) if several else None,
        over_batch(fit_ones, machine, asked) if several else None,
        dict(sensitivity(ranking.best[0], machine)) if ranking.best else {},
    )


def runs_of(mesh: str, asked: Asked, machine: Machine) -> list[Run]:
    """The runs of one mesh, with each number of microbatches. Raises ValueError if none can work."""
    axes, runs, flaw = parse_axes(mesh, asked.strategies), [], None
    stages = next((axis.size for axis in axes if axis.strategy == "pipeline_parallel"), 1)
    for microbatches, schedule in pipelines(stages, asked):
        try:
            runs.append(Run("torch", axes, asked.problem, asked.optimizer, 1, microbatches, schedule=schedule))
        except ValueError as error:
            flaw = error
    if not runs:
        raise flaw or ValueError(f"the mesh {mesh} cannot work")
    size = machine.network.hosts, machine.network.devices
    if runs[0].world_size != machine.network.size:
        raise ValueError(f"the mesh {mesh} has {runs[0].world_size} ranks, and there are {size[0]} x {size[1]} devices")
    return runs


def close(one: Prediction, best: Prediction) -> bool:
    """Whether a mesh is too close to the fastest to call it slower."""
    return one.seconds <= best.seconds * (1 + STATED_ERROR)


def label(run: Run) -> str:
    """A mesh with what its pipeline does: `pp=4,dp=8, 16 microbatches`."""
    if run.size("pipeline_parallel") == 1:
        return str(run.mesh)
    schedule = "" if run.schedule == "gpipe" else f", {run.schedule}"
    return f"{run.mesh}, {run.microbatches} microbatches{schedule}"


def document(answer: Plan) -> dict[str, Any]:
    """Plain JSON types. Seconds, bytes, bytes/s."""
    machine, problem = answer.machine, answer.asked.problem
    network, device = machine.network, machine.device
    return {
        "kind": "plan",
        "schema": 1,
        "commit": here.commit(),
        "devices": {
            "name": device.name,
            "hosts": network.hosts,
            "devices_per_host": network.devices,
            "flops_per_second": device.rate(problem.dtype),
            "memory_bytes": device.memory,
            "memory_bandwidth": device.memory_bandwidth,
            "inside": {"bandwidth": network.inside.bandwidth, "latency": network.inside.latency},
            "between": {"bandwidth": network.between.bandwidth, "latency": network.between.latency},
            "interfaces": network.interfaces,
            "sources": [*device.sources, machine.links_source],
        },
        "problem": {
            "batch": problem.batch,
            "width": problem.width,
            "layers": problem.layers,
            "dtype": problem.dtype,
            "optimizer": answer.asked.optimizer,
        },
        "stated_error": STATED_ERROR,
        "meshes": [mesh_document(one, answer.ranking.best[0]) for one in answer.ranking.best],
        "too_large": [too_large_document(one) for one in answer.ranking.too_large],
        "slower_meshes": answer.ranking.others,
        "refused_meshes": answer.ranking.refused,
        "crossovers": {
            "links": None if answer.links is None else [crossing_document(one, "bandwidth") for one in answer.links],
            "of_links": answer.level,
            "batch": None if answer.batch is None else [crossing_document(one, "batch") for one in answer.batch],
        },
        "twice_as_much": answer.gains,
    }


def run_document(run: Run) -> dict[str, Any]:
    """What tells one mesh from another."""
    return {
        "mesh": dict(run.mesh.axes),
        "strategies": list(run.strategies),
        "microbatches": run.microbatches if run.size("pipeline_parallel") > 1 else None,
        "schedule": run.schedule if run.size("pipeline_parallel") > 1 else None,
    }


def mesh_document(one: Prediction, best: Prediction) -> dict[str, Any]:
    """One prediction."""
    return {
        **run_document(one.run),
        "seconds": one.seconds,
        "compute": one.compute,
        "exposed": dict(one.exposed),
        "bubble": one.bubble,
        "update": one.update,
        "overhead": one.overhead,
        "communication": dict(one.communication),
        "max_of_compute_and_communication": one.naive,
        "memory": one.memory.to_json(),
        "memory_bytes": total(one.memory),
        "fits": one.fits,
        "too_close_to_call": close(one, best),
    }


def too_large_document(one: Candidate) -> dict[str, Any]:
    """A mesh that does not fit."""
    return {**run_document(one.run), "memory_bytes": one.needs, "fits": False}


def crossing_document(one: Crossing, name: str) -> dict[str, Any]:
    """One crossover."""
    return {name: one.at, "below": run_document(one.before), "above": run_document(one.after), "seconds": one.seconds}
