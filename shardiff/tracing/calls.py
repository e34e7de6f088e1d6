"""The calls that the ranks of a torch program made, and whether they fit together. Needs no torch.

Collectives: the k-th call of every rank of a group is one operation, because that is how the ranks meet. Messages:
between two ranks, in a group and under a tag, they arrive in the order in which they were sent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import zip_longest
from typing import Any, Literal

import msgspec

from shardiff.record import Part


@dataclass(frozen=True)
class Call:
    """One call of torch.distributed on one rank, or its wait for an earlier one. All ranks are global ones.

    rank: who calls. op: one of shardiff.record.OPS, or "send", "recv", "barrier"; "wait" for the end of an earlier
    call, "mark" for what is no call: see MARKS. payload_bytes: see there. shapes: of the tensors that were passed.
    group: its name; ranks: its members. reduction: sum, max, ...; None where nothing is reduced. peer: root, target or
    source; None for a receive from anyone. to, by: bytes to and from each member, where blocks can be uneven; empty
    means even ones. parts: as a Record's. of: the position, among this rank's calls, of the call that a wait or a mark
    is for. detail: what it moves: a parameter's gradient, a module; of a mark, what it says. moves: as a Record's.
    batched: a message that was posted together with others. time: when it was made, in seconds since 1970.
    """

    rank: int
    op: str
    dtype: str = ""
    payload_bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    group: str = ""
    ranks: tuple[int, ...] = ()
    reduction: str | None = None
    peer: int | None = None
    tag: int = 0
    to: tuple[int, ...] = ()
    by: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    of: int | None = None
    axis: str | None = None
    phase: str = "forward"
    is_async: bool = False
    source: str | None = None
    detail: str | None = None
    moves: Literal["parameter", "gradient", "activation"] | None = None
    flags: tuple[str, ...] = ()
    batched: bool = False
    time: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON types, without what is at its default; `Call.from_json` is its inverse."""
        found = {name: value for name, value in vars(self).items() if value is not DEFAULTS.get(name)}
        if self.parts:
            found["parts"] = [asdict(part) for part in self.parts]
        return found

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Call:
        """Inverse of `to_json`, also after a trip through JSON, which turns tuples into lists."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        values["shapes"] = tuple(map(tuple, fields.get("shapes", ())))
        parts = fields.get("parts", ())
        values["parts"] = tuple(Part(**part | {"shape": part["shape"] and tuple(part["shape"])}) for part in parts)
        return Call(**values)


DEFAULTS = {field.name: field.default for field in fields(Call) if field.default is not MISSING}
MESSAGES = ("send", "recv")
NO_CALLS = ("wait", "mark")
# What a mark says. begin: a forward or backward pass, the first since the last step. optimizer: an optimizer's step has
# ended. step: the program has said that a training step has. The others have a text after a blank.
MARKS = ("begin", "optimizer", "step", "unseen", "value", "parameter")


def made(rank: int, op: str, **fields: Any) -> Call:
    """Call(rank, op, **fields), in a fifth of the time, which a traced program spends for each of its calls."""
    call = object.__new__(Call)
    call.__dict__.update(fields, rank=rank, op=op)  # the defaults are attributes of the class
    return call


def filled(call: Call, **more: Any) -> Call:
    """A call that was made just now, and that nobody else knows yet, with more fields. Cheaper than another one."""
    vars(call).update(more)
    return call


def encoded(value: Any) -> bytes:
    """A line of JSON."""
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:  # a path that is no UTF-8
        return json.dumps(value).encode() + b"\n"


Place = tuple[int, int]  # a call: its rank, and its position among that rank's calls


@dataclass
class Operation:
    """Calls that belong together: a collective's, one of each rank in the order of its group; or a send's alone."""

    calls: list[Call]
    level: int = 0
    arrived: int = 0


def match_collectives(ranks: Sequence[Sequence[Call]]) -> tuple[dict[Place, Operation], list[str]]:
    """The operation that each call of a collective or barrier is part of, and the disagreements."""
    places: dict[tuple[str, tuple[int, ...]], dict[int, list[Place]]] = {}
    for rank, calls in enumerate(ranks):
        for i, call in enumerate(calls):
            if call.op not in (*MESSAGES, *NO_CALLS):
                places.setdefault((call.group, call.ranks), {}).setdefault(rank, []).append((rank, i))
    found: dict[Place, Operation] = {}
    problems = []
    for (name, members), by_rank in places.items():
        for number, column in enumerate(zip_longest(*(by_rank.get(rank, []) for rank in members)), 1):
            calls = [place and ranks[place[0]][place[1]] for place in column]
            if why := disagreement(calls):
                texts = [
                    f"{describe(call)}{why[i]}" if call else f"no such call (its last: {last_of(ranks, members[i])})"
                    for i, call in enumerate(calls)
                ]
                problems.append(f"group {name} ({ranks_text(members)}), call {number}: {sides(members, texts)}")
                break
            operation = Operation([call for call in calls if call])
            found |= {place: operation for place in column if place}
    return found, problems


def disagreement(calls: Sequence[Call | None]) -> list[str] | None:
    """None if the calls, one of each rank of a group, are one collective, else what to add to each's description."""
    present = [call for call in calls if call]
    if len(present) < len(calls) or any(must_agree(call) != must_agree(present[0]) for call in present):
        return [""] * len(calls)
    uneven = any(call.to or call.by for call in present)
    if not uneven or all(blocks_fit(a, b) for i, a in enumerate(present) for b in present[i:]):
        return None
    return [f", bytes to each rank {list(to_each(call))}, from each {list(from_each(call))}" for call in present]


def must_agree(call: Call) -> tuple[Any, ...]:
    """What all ranks of a collective must have in common."""
    same = call.op, call.dtype, call.reduction, call.peer, call.flags
    if call.op == "all_to_all":  # there the shapes may differ, but blocks must fit
        return same
    return (*same, call.payload_bytes, () if call.op == "all_gather" else call.shapes)


def blocks_fit(a: Call, b: Call) -> bool:
    """Whether two ranks of a collective expect of each other what they send."""
    i, j = a.ranks.index(a.rank), a.ranks.index(b.rank)
    return to_each(a)[j] == from_each(b)[i] and to_each(b)[i] == from_each(a)[j]


def to_each(call: Call) -> tuple[int, ...]:
    """Bytes to each member of the group."""
    return call.to or (call.payload_bytes // len(call.ranks),) * len(call.ranks)


def from_each(call: Call) -> tuple[int, ...]:
    """Bytes from each member of the group."""
    return call.by or (call.payload_bytes // len(call.ranks),) * len(call.ranks)


def match_messages(
    ranks: Sequence[Sequence[Call]],
) -> tuple[dict[Place, Operation], dict[Place, Operation], list[str]]:
    """Each send as an operation, what each receive got, and the disagreements.

    Between two ranks, in a group and under a tag, messages arrive in the order in which they were sent. A receive from
    anyone whose source was never learned takes what is left.
    """
    sources = {
        (r, c.of): c.peer for r, calls in enumerate(ranks) for c in calls if c.op == "wait" and c.peer is not None
    }
    lanes: dict[tuple[Any, ...], tuple[list[Place], list[Place]]] = defaultdict(lambda: ([], []))
    from_any: list[Place] = []
    for rank, calls in enumerate(ranks):
        for i, call in enumerate(calls):
            peer = sources.get((rank, i), call.peer)
            if call.op == "send":
                lanes[rank, peer, call.group, call.ranks, call.tag][0].append((rank, i))
            elif call.op == "recv" and peer is None:
                from_any.append((rank, i))
            elif call.op == "recv":
                lanes[peer, rank, call.group, call.ranks, call.tag][1].append((rank, i))

    for rank, i in from_any:
        call = ranks[rank][i]
        for (source, target, *lane), (sent, got) in sorted(lanes.items(), key=lambda item: item[0][0]):
            if (target, *lane) == (rank, call.group, call.ranks, call.tag) and len(sent) > len(got):
                got.append((rank, i))
                break
        else:
            lanes[None, rank, call.group, call.ranks, call.tag][1].append((rank, i))

    sends: dict[Place, Operation] = {}
    received: dict[Place, Operation] = {}
    problems = []
    for (source, target, *_), (sent, got) in lanes.items():
        for number, (a, b) in enumerate(zip_longest(sent, got), 1):
            here, there = a and ranks[a[0]][a[1]], b and ranks[b[0]][b[1]]
            if not here or not there or (here.dtype, here.payload_bytes) != (there.dtype, there.payload_bytes):
                texts = [
                    describe(here) if here else "no such send",
                    describe(there) if there else "no such receive",
                ]
                who = "any rank" if source is None else f"rank {source}"
                problems.append(
                    f"message {number} from {who} to rank {target}: {who}: {texts[0]}; rank {target}: {texts[1]}"
                )
                break
            operation = Operation([here])
            sends[a], received[b] = operation, operation
    return sends, received, problems


def last_of(ranks: Sequence[Sequence[Call]], rank: int) -> str:
    """The last that a rank called, if anything."""
    calls = ranks[rank] if rank < len(ranks) else []
    return next((describe(call) for call in reversed(calls) if call.op not in NO_CALLS), "none")


def describe(call: Call) -> str:
    """A call in a line's part: all_reduce(sum) float32 16 B [4] at train.py:3."""
    words = [f"{call.op}({call.reduction})" if call.reduction else call.op, *call.flags]
    if call.dtype:
        words += [call.dtype, f"{call.payload_bytes:,} B", *(str(list(shape)) for shape in call.shapes)]
    if call.peer is not None:
        words += [{"send": "to", "recv": "from"}.get(call.op, "root"), f"rank {call.peer}"]
    if call.tag:
        words.append(f"tag {call.tag}")
    if call.detail:
        words.append(f"({call.detail})")
    return " ".join([*words, "at", call.source or "an unknown line"])


def sides(members: Sequence[int], texts: Sequence[str]) -> str:
    """Who does what, those who do the same together."""
    who: dict[str, list[int]] = defaultdict(list)
    for rank, text in zip(members, texts, strict=True):
        who[text].append(rank)
    return "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in who.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0, 1; ranks 0 to 7."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
