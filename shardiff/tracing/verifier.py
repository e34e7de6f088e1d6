"""Whether the calls of the ranks fit together, found while the program runs: before a call blocks. Needs no torch.

Every process announces each call before it makes it. Before what would wait for other ranks it is then held until they
have announced their part. A collective that is not asynchronous counts as waiting for its whole group, and a send as
waiting for its receive: the MPI standard lets both do so, and a program that needs them not to is not correct.

So a mismatch is seen at the second of two calls, and a deadlock without a timeout: a held rank cannot go on if one that
it waits for cannot either, or has ended. A rank that waits where nobody can see it, as in C++, counts as running.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from shardiff.tracing.calls import MESSAGES, NO_CALLS, Call, Place, describe, disagreement, last_of, ranks_text, sides
from shardiff.tracing.silent import suspicion


@dataclass(frozen=True)
class Verdict:
    """Why the program cannot go on.

    kind: "mismatch", "deadlock", or "stuck" for a rank that does not come in time. text: one line, with all sides.
    failed: whether a process has ended badly before, and may show an error of its own. running: what is not held.
    """

    kind: str
    text: str
    failed: bool = False
    running: tuple[Any, ...] = ()


@dataclass
class Process:
    """A process of the program. Its rank is that of its calls; before the first, the one it was started as, if any."""

    began: int  # this and `ended` are numbers of events
    rank: int | None
    first: int | None = None  # where its calls begin among those of its rank
    held: Place | None = None
    since: float = 0.0
    ended: int | None = None
    failed: bool = False


@dataclass
class Mailbox:
    """Messages to one rank, in a group and under a tag: who sent, and from whom it receives, in order."""

    sent: dict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))
    from_any: int = 0  # receives from anyone whose source is not known yet
    loose: bool = False  # there was one: which message a receive gets is known too late to compare


class Verifier:
    """What is known of all processes, each under a key.

    num_processes: as many begin for certain; others may. strict: ranks that move different things, or come from
    different lines, may not go on either. Times are seconds of any clock. After every event, `released`
    says who may go on, and `verdict` is set as soon as the program cannot.
    """

    def __init__(self, num_processes: int, strict: bool = False) -> None:
        self.strict = strict
        self.verdict: Verdict | None = None
        self.calls: dict[int, list[Call]] = defaultdict(list)
        self.processes: dict[Hashable, Process] = {}
        self.of_rank: dict[int, Process] = {}  # the latest that called as this rank
        self.to_come, self.events = num_processes, 0
        self.numbers: dict[Place, int] = {}  # which call of its group, or message between its two ranks, it is
        self.counts: dict[tuple[Any, int], int] = defaultdict(int)  # of a group and a rank
        self.columns: dict[tuple[Any, int], dict[int, Place]] = {}  # group and number, while not all have called
        self.ages: dict[tuple[Any, int], float] = {}  # of the same; the first is the oldest
        self.mail: dict[Any, Mailbox] = defaultdict(Mailbox)

    def ranks(self) -> list[list[Call]]:
        """The calls of every global rank, for `merge`."""
        return [self.calls.get(rank, []) for rank in range(max(self.calls, default=-1) + 1)]

    def begin(self, key: Hashable, rank: int | None) -> None:
        """A process is there; rank: if it is one of the `num_processes`, as which it was started."""
        self.events += 1
        self.to_come -= rank is not None
        self.processes[key] = Process(self.events, rank)

    def call(self, key: Hashable, call: Call, now: float) -> None:
        """It is about to make a call."""
        process, calls = self.processes[key], self.calls[call.rank]
        if process.first is None:
            process.rank, process.first = call.rank, len(calls)
            self.of_rank[call.rank] = process
        place = call.rank, len(calls)
        calls.append(call if call.of is None else replace(call, of=call.of + process.first))
        if call.op in NO_CALLS:
            self.learn_source(calls[-1])
        elif call.op in MESSAGES:
            self.message(call, place)
        else:
            self.collective(call, place, now)

    def hold(self, key: Hashable, position: int, now: float) -> None:
        """It waits until its call of this position can go on."""
        process = self.processes[key]
        assert process.rank is not None and process.first is not None, "it has made a call"
        process.held, process.since = (process.rank, process.first + position), now

    def end(self, key: Hashable, failed: bool) -> None:
        """It will make no more calls. failed: it has not said so itself, but is gone."""
        self.events += 1
        process = self.processes[key]
        process.ended, process.held, process.failed = self.events, None, failed
        for rank in [rank for rank, latest in self.of_rank.items() if latest is process]:
            for (group, number), column in self.columns.items():
                self.missed(group, number, column, rank)

    def released(self) -> list[Any]:
        """Who was held and may go on: nobody after a verdict, which it is if none of them can ever be freed."""
        if self.verdict:
            return []
        free = [key for key, process in self.processes.items() if process.held and self.ready(process.held)]
        for key in free:
            self.processes[key].held = None
        if blocked := self.blocked():
            failed = any(process.failed for process in self.processes.values())
            self.conclude("deadlock", f"deadlock: {'; '.join(self.standing(blocked))}", failed)
        return free

    def overdue(self, timeout: float, now: float) -> None:
        """The verdict if a rank has waited longer than that for one that seems to run."""
        held = [process for process in self.processes.values() if process.held]
        oldest = next(iter(self.columns.values()), {}) if not held else {}  # awaited, if at all, where nobody sees it
        if now - min([process.since for process in held] + [next(iter(self.ages.values()), now)]) > timeout:
            texts = self.standing(held)
            texts += [
                f"rank {rank} is at {self.where(place)}: {describe(self.at(place))}" for rank, place in oldest.items()
            ]
            running = {key: p for key, p in self.processes.items() if p.ended is None and not p.held}
            running = {key: p for key, p in running.items() if p.first is not None or p.rank not in self.of_rank}
            ranks = sorted({p.rank for p in running.values() if p.rank is not None} - oldest.keys())
            texts += [f"rank {rank} does not come (its last: {last_of(self.ranks(), rank)})" for rank in ranks]
            text = f"stuck for {timeout:g} s: {'; '.join(texts)}"
            self.verdict = self.verdict or Verdict("stuck", text, running=tuple(running))

    def collective(self, call: Call, place: Place, now: float) -> None:
        group = call.group, call.ranks
        self.counts[group, call.rank] += 1
        number = self.numbers[place] = self.counts[group, call.rank]
        column = self.columns.setdefault((group, number), {})
        if any(disagreement([self.at(other), call]) for other in column.values()):
            column[call.rank] = place
            members = [rank for rank in call.ranks if rank in column]
            calls = [self.at(column[rank]) for rank in members]
            texts = [f"{describe(c)}{why}" for c, why in zip(calls, disagreement(calls) or (), strict=True)]
            return self.conclude("mismatch", f"{self.where(place)}: {sides(members, texts)}")
        column[call.rank] = place
        members = [rank for rank in call.ranks if rank in column]
        if self.strict and (text := suspicion([self.at(column[rank]) for rank in members])):
            return self.conclude("mismatch", f"{self.where(place)}: {text}")
        self.ages.setdefault((group, number), now)
        if len(column) == len(call.ranks):
            del self.columns[group, number], self.ages[group, number]
        for rank in call.ranks:
            if rank not in column and self.is_gone(rank, self.of_rank[call.rank]):
                self.missed(group, number, column, rank)

    def missed(self, group: tuple[str, tuple[int, ...]], number: int, column: dict[int, Place], rank: int) -> None:
        """The verdict if this rank, which has ended, is one that a collective waits for."""
        if rank not in column and rank in group[1]:
            members = [member for member in group[1] if member in column]
            place = column[members[0]]
            texts = [describe(self.at(column[member])) for member in members]
            ended = f"no such call, it has ended (its last: {last_of(self.ranks(), rank)})"
            text = f"{self.where(place)}: {sides([*members, rank], [*texts, ended])}"
            self.conclude("mismatch", text, self.of_rank[rank].failed)

    def message(self, call: Call, place: Place) -> None:
        box = self.mail[self.address(call)]
        if call.op == "recv" and call.peer is None:
            box.from_any, box.loose = box.from_any + 1, True
            return
        source = call.rank if call.op == "send" else call.peer
        assert source is not None
        mine, others = (box.sent, box.taken) if call.op == "send" else (box.taken, box.sent)
        mine[source].append(place)
        number = self.numbers[place] = len(mine[source])
        if box.loose or number > len(others[source]):
            return
        other = self.at(others[source][number - 1])
        if (call.dtype, call.payload_bytes) != (other.dtype, other.payload_bytes):
            pair = (call, other) if call.op == "send" else (other, call)
            texts = "; ".join(f"rank {c.rank}: {describe(c)}" for c in pair)
            self.conclude("mismatch", f"message {number} from rank {source} to rank {pair[1].rank}: {texts}")

    def learn_source(self, wait: Call) -> None:
        """A receive from anyone is done, and says from whom it was."""
        if wait.op == "wait" and wait.peer is not None:
            place = wait.rank, wait.of or 0
            box = self.mail[self.address(self.at(place))]
            box.from_any -= 1
            box.taken[wait.peer].append(place)

    def conclude(self, kind: str, text: str, failed: bool = False) -> None:
        """The first verdict stands."""
        self.verdict = self.verdict or Verdict(kind, text, failed)

    def at(self, place: Place) -> Call:
        return self.calls[place[0]][place[1]]

    def address(self, call: Call) -> tuple[Any, ...]:
        """The mailbox that a message goes through."""
        return call.peer if call.op == "send" else call.rank, call.group, call.ranks, call.tag

    def ready(self, place: Place) -> bool:
        """Whether all that a call waits for has been announced."""
        call = self.at(place)
        if call.op not in MESSAGES:
            return ((call.group, call.ranks), self.numbers[place]) not in self.columns
        box = self.mail[self.address(call)]
        if call.op == "send":
            return self.numbers[place] <= len(box.taken[call.rank]) + box.from_any
        if call.peer is not None:
            return self.numbers[place] <= len(box.sent[call.peer])
        return any(len(sent) > len(box.taken[source]) for source, sent in box.sent.items())

    def blocked(self) -> list[Process]:
        """Those held that cannot go on whatever the running ones do."""
        live = [process for process in self.processes.values() if process.ended is None]
        able = {id(process) for process in live if not process.held}
        held = [process for process in live if process.held]
        while freed := [process for process in held if self.may_go_on(process, able)]:
            able |= set(map(id, freed))
            held = [process for process in held if id(process) not in able]
        return held

    def may_go_on(self, process: Process, able: set[int]) -> bool:
        """Whether those that it waits for may come, if the processes `able` (by id) can go on."""
        awaited = [self.may_come(rank, process, able) for rank in self.awaited(process)]
        call = self.at(process.held or (0, 0))
        return any(awaited) if call.op == "recv" and call.peer is None else all(awaited)

    def awaited(self, process: Process) -> list[int]:
        """The ranks that a held process waits for: for all of them, or any of them if it receives from anyone."""
        assert process.held
        call = self.at(process.held)
        if call.op not in MESSAGES:
            column = self.columns[(call.group, call.ranks), self.numbers[process.held]]
            return [rank for rank in call.ranks if rank not in column]
        return [rank for rank in call.ranks if rank != call.rank] if call.peer is None else [call.peer]

    def may_come(self, rank: int, process: Process, able: set[int]) -> bool:
        """Whether this rank may still make calls that meet those of the process."""
        latest = self.of_rank.get(rank)
        if latest is not None and latest.ended is None:
            return id(latest) in able
        if self.is_gone(rank, process):
            return False
        silent = any(other.first is None and other.ended is None for other in self.processes.values())
        return self.to_come > 0 or silent  # it can still become that rank, or start it

    def is_gone(self, rank: int, process: Process) -> bool:
        """Whether this rank has ended during the life of the process, and not before it, as one of an earlier group."""
        latest = self.of_rank.get(rank)
        return latest is not None and latest.ended is not None and latest.ended > process.began

    def where(self, place: Place) -> str:
        call = self.at(place)
        if call.op not in MESSAGES:
            return f"group {call.group} ({ranks_text(call.ranks)}), call {self.numbers[place]}"
        which = f"message {self.numbers[place]}" if place in self.numbers else "message"
        peer = "any rank" if call.peer is None else f"rank {call.peer}"
        return f"{which} {'to' if call.op == 'send' else 'from'} {peer}"

    def standing(self, held: list[Process]) -> list[str]:
        """Who waits where, and which of those that they wait for have ended or never came."""
        texts, absent = [], {}
        for process in held:
            assert process.held
            texts.append(f"rank {process.rank} waits in {self.where(process.held)}: {describe(self.at(process.held))}")
            for rank in self.awaited(process):
                if self.is_gone(rank, process):
                    absent[rank] = f"rank {rank} has ended (its last: {last_of(self.ranks(), rank)})"
                elif rank not in self.of_rank:
                    absent[rank] = f"rank {rank} has ended without a call"
        return [*texts, *absent.values()]
