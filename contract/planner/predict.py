"""A run on a machine -> the time of one step, what it is spent on, and the memory of a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from contract import memory
from contract.planner.bounds import Groups, Stage, lasting, replayed, stages_of
from contract.planner.instructions import Begin, Compute, Instructions, Send
from contract.planner.places import Place, Placement, everyone, placement
from contract.planner.program import step
from contract.planner.simulate import simulate
from contract.planner.timetable import timetable
from contract.strategy import Run
from shardiff.cost import Network
from shardiff.devices import Machine

# layers: the passes of a pipeline of more are replayed with the time that they take alone, and not simulated layer by
# layer. It takes milliseconds instead of a second, and leaves out which of them share a link at the same time.
MOST_SIMULATED = 8
MOST_RANKS = 16  # of which each is simulated, where ranks that do the same drift apart
STATED_ERROR = 0.05  # of a predicted step time: two meshes whose times differ by less are too close to call


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step of the rank that is done last; they add up to `seconds`.

    compute: forward and backward passes. exposed: axis -> waiting for its communication. bubble: waiting for other
    stages, which communication between stages does not cause. update: of the parameters; overhead: what nothing hides.
    communication: axis -> seconds if nothing overlapped. memory: bytes of the device that needs most; fits: whether
    the device has them.
    """

    run: Run
    seconds: float
    compute: float
    exposed: Mapping[str, float]
    bubble: float
    update: float
    overhead: float
    communication: Mapping[str, float]
    memory: memory.Memory
    fits: bool

    @property
    def naive(self) -> float:
        """max(compute, communication): what a rule of thumb predicts, for comparison."""
        return max(self.compute + self.update, sum(self.communication.values())) + self.overhead


def predict(run: Run, machine: Machine, stages: list[Stage] | None = None) -> Prediction:
    """One step. stages: of the run on these devices, where they are known. Raises ValueError for a mesh that does not
    fill the machine."""
    placed = placement(run, machine.network)
    if len(placed.ranks) > 1:
        stages = stages or stages_of(run, machine, placed.ranks)
    if stages and run.problem.layers > MOST_SIMULATED:
        return by_replay(run, machine, placed, stages)
    simulated = everyone(run, machine.network) if drift_apart(machine.network) else placed
    made = [step(run, rank, machine.device) for rank in simulated.ranks]
    outcome = simulate(made, simulated.places, machine.network)
    last = max(range(len(made)), key=lambda i: outcome.ends[i])
    spent, waits, bubble = outcome.spent[last], dict(outcome.waits[last]), 0.0
    if stages:
        stage = run.mesh.coordinates(simulated.ranks[last])["pp"]
        alone = replayed(run, stages, placed, machine.network, stage)
        bubble = min(alone.bubble, waits.get("pp", 0.0))
        waits["pp"] = waits.get("pp", 0.0) - bubble
    return Prediction(
        run,
        outcome.seconds,
        spent.get("forward", 0.0) + spent.get("backward", 0.0),
        waits,
        bubble,
        spent.get("update", 0.0),
        spent.get("overhead", 0.0),
        communication(made[last], simulated.places[last], machine.network),
        (needed := most_memory(run, placed.ranks)),
        total(needed) <= machine.device.memory,
    )


def drift_apart(network: Network) -> bool:
    """Whether ranks that do the same do it at different times, because one waits behind the other for a link between
    hosts. Then every rank is simulated, on a machine that is small enough for that."""
    return bool(network.between.window) and network.hosts > 1 and network.size <= MOST_RANKS


def seconds_of(run: Run, machine: Machine) -> float:
    """The time of a step alone, as `predict` has it."""
    placed = placement(run, machine.network)
    if len(placed.ranks) > 1 and run.problem.layers > MOST_SIMULATED:
        stages = stages_of(run, machine, placed.ranks)
        return replayed(run, stages, placed, machine.network, with_bubble=False).seconds
    return predict(run, machine).seconds


def computed(run: Run, machine: Machine) -> float:
    """Seconds that the busiest rank of a step computes."""
    ranks = placement(run, machine.network).ranks
    programs = (step(run, rank, machine.device) for rank in ranks)
    return max(sum(one.seconds for one in program if isinstance(one, Compute)) for program in programs)


def by_replay(run: Run, machine: Machine, placed: Placement, stages: list[Stage]) -> Prediction:
    """A pipeline of very many passes."""
    found, counts = replayed(run, stages, placed, machine.network), timetable(run).counts
    stage, groups = stages[found.last], placed.places[found.last].groups
    exposed, communicated = {"pp": found.idle - found.bubble}, {"pp": found.sending}
    for what, times in counts[found.last].items():
        for key, often in stage.passes[what].waited.items():
            taken = times * lasting(Counter({key: often}), groups, machine.network)
            exposed[key[0]] = exposed.get(key[0], 0.0) + taken
            communicated[key[0]] = communicated.get(key[0], 0.0) + taken
    for key, often in stage.once.waited.items():
        taken = lasting(Counter({key: often}), groups, machine.network)
        exposed[key[0]] = exposed.get(key[0], 0.0) + taken
        communicated[key[0]] = communicated.get(key[0], 0.0) + taken
    for key, often in (*stage.gradients.beside.items(), *stage.gradients.waited.items()):
        taken = lasting(Counter({key: often}), groups, machine.network)
        communicated[key[0]] = communicated.get(key[0], 0.0) + taken
        exposed[key[0]] = exposed.get(key[0], 0.0) + found.after * taken / max(total_of(stage, groups, machine), 1e-30)
    computed = sum(times * stage.passes[what].seconds for what, times in counts[found.last].items())
    return Prediction(
        run,
        found.seconds,
        computed,
        exposed,
        found.bubble,
        stage.once.seconds - machine.device.overhead,
        machine.device.overhead,
        communicated,
        (needed := most_memory(run, placed.ranks)),
        total(needed) <= machine.device.memory,
    )


def total_of(stage: Stage, groups: Groups, machine: Machine) -> float:
    """Seconds of all collectives of a stage's gradients."""
    return lasting(stage.gradients.beside + stage.gradients.waited, groups, machine.network)


def most_memory(run: Run, ranks: Sequence[int]) -> memory.Memory:
    """Of the simulated rank that needs most. Stages in the middle need less than the second, if there are several."""
    ends = dict.fromkeys((*ranks[:2], ranks[-1]))
    return max((memory.of_rank(run, rank) for rank in ends), key=total)


def total(needed: memory.Memory) -> int:
    """All bytes of a rank."""
    return sum(needed.to_json().values())


def communication(program: Instructions, place: Place, network: Network) -> dict[str, float]:
    """Axis -> seconds of what one rank sends, one after the other. A message counts as a permute along pp."""
    found: Counter[tuple[str, str, int]] = Counter()
    for one in program:
        if isinstance(one, Begin):
            found[one.axis, one.op, one.payload] += 1
        elif isinstance(one, Send):
            found["pp", "collective_permute", one.size] += 1
    taken: dict[str, float] = {}
    for (axis, op, payload), times in found.items():
        taken[axis] = taken.get(axis, 0.0) + times * network.seconds(op, payload, place.groups[axis])
    return taken
