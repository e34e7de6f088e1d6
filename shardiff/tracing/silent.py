"""What is wrong, or may be, though all collectives fit together. Needs no torch.

Ranks may meet in a collective of one op, shape and type and yet move different parameters, or come from different
lines; replicas may have drifted apart; messages may depend on an order that only some backends keep.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence

from shardiff.tracing.calls import MESSAGES, Call, Operation, Place, describe, match_collectives, ranks_text, sides

ROOTED = ("broadcast", "reduce", "gather", "scatter")  # whose root may well call from a line of its own


def suspicions(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """A line for each way in which ranks of one collective move different things or come from different lines."""
    found, _ = match_collectives(ranks)
    times: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    numbers: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for operation in distinct(found):
        call = operation.calls[0]
        numbers[call.group, call.ranks] += 1
        if text := suspicion(operation.calls):
            where = f"group {call.group} ({ranks_text(call.ranks)})"
            times[where, text] += 1
            first.setdefault((where, text), f"{where}, call {numbers[call.group, call.ranks]}")
    return [f"{first[key]}: {key[1]}{f' ({n:,} times)' if n > 1 else ''}" for key, n in times.items()]


def suspicion(calls: Sequence[Call]) -> str | None:
    """Both sides, if these calls of one collective move different things or come from different lines."""
    details = {call.detail for call in calls if call.detail}
    lines = {call.source for call in calls if call.source} if calls[0].op not in (*ROOTED, "barrier") else set()
    if len(details) < 2 and len(lines) < 2:
        return None
    return sides([call.rank for call in calls], [describe(call) for call in calls])


def differences(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """The first result of a collective that is not bit for bit the same on all its ranks, and the first parameter of a
    DistributedDataParallel; each with the number of those after it. From the marks that `Values` has made."""
    lines = []
    found, _ = match_collectives(ranks)
    values = {
        (r, call.of): words[1]
        for r, calls in enumerate(ranks)
        for call in calls
        if call.op == "mark" and (words := (call.detail or "").split(" ", 1))[0] == "value"
    }
    unequal = []
    by_operation: dict[int, list[tuple[Place, str]]] = defaultdict(list)
    for place, operation in found.items():
        if (value := values.get(place)) is not None:
            by_operation[id(operation)].append((place, value))
    for operation in distinct(found):
        seen = by_operation.get(id(operation), [])
        if len({value for _, value in seen}) > 1:
            texts = [f"{describe(ranks[r][i])} has {value[:8]}" for (r, i), value in seen]
            unequal.append(sides([r for (r, _), _ in seen], texts))
    if unequal:
        more = f" ({len(unequal) - 1:,} later results differ too)" if len(unequal) > 1 else ""
        lines.append(f"the result differs between ranks, by a hash of its bits: {unequal[0]}{more}")
    return lines + parameter_differences(ranks)


def parameter_differences(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """Of the parameters of each DistributedDataParallel."""
    noted: dict[tuple[tuple[int, ...], int], dict[int, dict[str, dict[str, str]]]] = defaultdict(dict)
    for rank, calls in enumerate(ranks):
        numbers: Counter[tuple[int, ...]] = Counter()
        for call in calls:
            kind, _, text = (call.detail or "").partition(" ")
            if call.op == "mark" and kind == "parameter":
                about = json.loads(text)
                members = tuple(about["ranks"])
                noted[members, numbers[members]][rank] = {about["when"]: about["hashes"]}
                numbers[members] += 1
    lines: dict[tuple[int, ...], str] = {}
    for (members, _), by_rank in sorted(noted.items(), key=lambda item: item[0][1]):
        [when, *_] = [when for each in by_rank.values() for when in each]
        hashes = {rank: next(iter(each.values())) for rank, each in by_rank.items()}
        for name in next(iter(hashes.values())):
            texts = [f"{each.get(name, 'none')[:8]}" for each in hashes.values()]
            if len(set(texts)) > 1 and members not in lines:
                lines[members] = f"the parameter {name} differs between replicas {when}: {sides(list(hashes), texts)}"
    return list(lines.values())


def unbatched(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """A line on each group of more than two ranks that exchange messages one by one, where a rank has several peers."""
    peers: dict[tuple[int, ...], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    lines: dict[tuple[int, ...], dict[str, None]] = defaultdict(dict)
    for calls in ranks:
        for call in calls:
            if call.op in MESSAGES and not call.batched and call.peer is not None and len(call.ranks) > 2:
                peers[call.ranks][call.rank].add(call.peer)
                lines[call.ranks][call.source or "an unknown line"] = None
    return [
        f"{ranks_text(members)} exchange unbatched messages ({', '.join(list(lines[members])[:4])}): whether that ends "
        "depends on their order and on the backend; dist.batch_isend_irecv posts them together"
        for members, of_rank in peers.items()
        if any(len(others) > 1 for others in of_rank.values())
    ]


def unseen(ranks: Sequence[Sequence[Call]]) -> list[str]:
    """The operators that communicate in a way that nobody here knows."""
    marks = (call.detail or "" for calls in ranks for call in calls if call.op == "mark")
    return list(dict.fromkeys(text.removeprefix("unseen ") for text in marks if text.startswith("unseen ")))


def distinct(found: dict[Place, Operation]) -> list[Operation]:
    """Each operation once."""
    return list({id(operation): operation for operation in found.values()}.values())
