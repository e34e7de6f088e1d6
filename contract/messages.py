"""What a stage sends and receives when, for any schedule: its actions with the messages between them, as data.

A message is the result of an action that another stage needs, so it is named by that action. A stage sends a result as
soon as it has it, and posts a receive one action ahead, so that data arrives while it computes. NCCL runs the transfers
between two ranks in the order in which they are posted, so both sides post them in one order: that in which the
messages come about if every action takes as long. `check` plays the programs under this rule, so that a deadlock is
found before anything runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from contract.schedule import Action, Schedule
from contract.schedule_time import Deadlock, play


class Step(NamedTuple):
    """What a stage does: "run" an action, "send" its result, post a "receive" of another stage's result, or "sum".

    action: for a receive, that of the stage that sends. "sum" starts the sum of the loss over all stages.
    """

    op: str
    action: Action | None


Program = tuple[Step, ...]  # of one stage


@lru_cache(64)
def programs(schedule: Schedule, forward_only: bool = False) -> tuple[Program, ...]:
    """What each stage does, in its order. The sum of the loss starts after the last forward pass of a stage.

    Raises Deadlock if they cannot finish.
    """
    made = tuple(_programs(schedule, forward_only))
    check(schedule, made)
    return made


def _programs(schedule: Schedule, forward_only: bool) -> Iterator[Program]:
    ends = play(schedule, dict.fromkeys((a for order in schedule.orders for a in order), 1))
    sent = [
        action
        for action in sorted(ends, key=lambda action: (ends[action][1], action.stage))
        if (action.kind == "forward" or not forward_only) and _crosses(schedule, action)
    ]
    position = {action: i for i, action in enumerate(sent)}
    for stage, order in enumerate(schedule.orders):
        todo = [action for action in order if action.kind == "forward" or not forward_only]
        coming: dict[int, list[Action]] = defaultdict(list)  # from each stage, in the order of the channel
        for action in sent:
            target = schedule.target(action)
            assert target is not None
            if target.stage == stage:
                coming[action.stage].append(action)
        steps: list[Step] = []
        sent_to: dict[int, list[Action]] = defaultdict(list)  # what is still to be sent, to each stage
        for action in todo:
            if action in position:
                sent_to[_peer(schedule, action)].append(action)

        def post(upto: int, peer: int) -> None:
            """Post all receives from `peer` up to a message, which no own send to it may precede in the channel."""
            while coming[peer] and position[coming[peer][0]] <= upto:
                steps.append(Step("receive", coming[peer].pop(0)))

        def ahead(action: Action, must: bool) -> None:
            """Post the receive that an action needs, unless the channel still waits for one of this stage's sends."""
            source = schedule.source(action)
            if source is None or source not in position or source not in coming[source.stage]:
                return
            own = sent_to[source.stage]
            if must or not own or position[own[0]] > position[source]:
                post(position[source], source.stage)

        last_forward = max(i for i, action in enumerate(todo) if action.kind == "forward")
        for i, action in enumerate(todo):
            ahead(action, must=True)
            if i + 1 < len(todo):
                ahead(todo[i + 1], must=False)
            steps.append(Step("run", action))
            if action in position:
                peer = _peer(schedule, action)
                post(position[action], peer)
                steps.append(Step("send", action))
                sent_to[peer].remove(action)
            if i == last_forward:
                steps.append(Step("sum", None))
        yield tuple(steps)


def _crosses(schedule: Schedule, action: Action) -> bool:
    target = schedule.target(action)
    return target is not None and target.stage != action.stage


def _peer(schedule: Schedule, action: Action) -> int:
    target = schedule.target(action)
    assert target is not None
    return target.stage


def check(schedule: Schedule, made: Sequence[Program]) -> None:
    """Play the programs as NCCL would run them: raises Deadlock, in one line, where stages wait for each other.

    A transfer takes place once both sides have posted it and all that they posted before it for the other side. An
    action waits for what it needs, and every stage waits for the sum of the loss.
    """
    at = [0] * len(made)
    posted: dict[tuple[int, int], list[Action]] = defaultdict(list)  # (stage, peer) -> messages, sent and received
    done: set[Action] = set()
    arrived: set[Action] = set()
    summing = 0

    def transfer(a: int, b: int) -> None:
        for mine, theirs in zip(posted[a, b], posted[b, a], strict=False):
            if mine != theirs:
                break
            arrived.add(mine)

    def waits(stage: int) -> str | None:
        """What keeps a stage from its next step; None if nothing does."""
        op, action = made[stage][at[stage]]
        if op == "sum":
            return None if summing == len(made) else f"stage {stage} waits for all stages to sum the loss"
        assert action is not None
        if op != "run":
            return None
        for need in schedule.needs(action):
            if need.stage != stage and need not in arrived or need.stage == stage and need not in done:
                return f"{action} on stage {stage} waits for {need} of stage {need.stage}"
        return None

    moved = True
    counted: set[int] = set()
    while moved:
        moved = False
        for stage, program in enumerate(made):
            while at[stage] < len(program):
                op, action = program[at[stage]]
                if op == "sum" and stage not in counted:
                    counted.add(stage)
                    summing += 1
                    moved = True
                if waits(stage):
                    break
                if op in ("send", "receive"):
                    assert action is not None
                    peer = _peer(schedule, action) if op == "send" else action.stage
                    posted[stage, peer].append(action)
                    transfer(stage, peer)
                elif op == "run":
                    assert action is not None
                    done.add(action)
                at[stage] += 1
                moved = True
    stuck = [waits(stage) for stage in range(len(made)) if at[stage] < len(made[stage])]
    if stuck:
        raise Deadlock(f"deadlock: {'; '.join(text for text in stuck if text)}{_crossed(posted)}")


def _crossed(posted: dict[tuple[int, int], list[Action]]) -> str:
    """Where two stages have posted their transfers in different orders."""
    for (a, b), mine in posted.items():
        for here, there in zip(mine, posted.get((b, a), []), strict=False):
            if here != there:
                ours, theirs = (f"{each} of stage {each.stage}" for each in (here, there))
                return f": stage {a} has posted {ours} where stage {b} has posted {theirs}"
    return ""


def levels(schedule: Schedule, made: Collection[Program]) -> list[tuple[int, Action]]:
    """Each message with its level on a logical clock (Lamport 1978), in the order of the levels.

    A message is one level above all that its stage has sent or waited for: what is sent in one tick has one level.
    """
    clock, at = [0] * len(made), [0] * len(made)
    level: dict[Action, int] = {}
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(made):
            while at[stage] < len(program):
                op, action = program[at[stage]]
                if op == "run" and action is not None:
                    source = schedule.source(action)
                    if source is not None and source.stage != stage:
                        if source not in level:
                            break
                        clock[stage] = max(clock[stage], level[source])
                elif op == "send" and action is not None:
                    clock[stage] += 1
                    level[action] = clock[stage]
                at[stage] += 1
                moved = True
    return sorted(((number, action) for action, number in level.items()), key=lambda pair: pair[0])
