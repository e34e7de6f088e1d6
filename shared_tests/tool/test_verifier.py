"""The verifier by a sequence of events: calls that do not fit together, and waits that cannot end. No ranks start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardiff.tracing.calls import Call
from shardiff.tracing.stacks import ask
from shardiff.tracing.verifier import Verdict, Verifier

PAIR = (0, 1)
Event = tuple[str, int, Any]  # what a process, by its rank, does


def of(rank: int, op: str, **fields: Any) -> tuple[str, int, Call]:
    """A call of 4 float32 in a group of two ranks."""
    defaults: dict[str, Any] = {"dtype": "float32", "payload_bytes": 16, "shapes": ((4,),), "group": "0", "ranks": PAIR}
    return "call", rank, Call(rank, op, **{**defaults, "source": f"{'abc'[rank]}.py:{len(op)}", **fields})


def hold(rank: int, position: int) -> Event:
    return "hold", rank, position


def end(rank: int, failed: bool = False) -> Event:
    return "end", rank, failed


def judge(*events: Event, num_ranks: int = 2) -> tuple[Verifier, list[list[int]]]:
    """A verifier after these events, one per second, and which ranks were released after each."""
    verifier, released = Verifier(num_ranks), []
    for rank in range(num_ranks):
        verifier.begin(rank, rank)
    for now, (what, rank, value) in enumerate(events):
        getattr(verifier, what)(rank, value, *([] if what == "end" else [float(now)]))
        released.append(verifier.released())
        assert not (verifier.verdict and released[-1]), "nobody may go on into what is wrong"
    return verifier, released


def verdict(*events: Event, num_ranks: int = 2) -> Verdict:
    """The verdict, which must come with the last event."""
    assert judge(*events[:-1], num_ranks=num_ranks)[0].verdict is None
    found = judge(*events, num_ranks=num_ranks)[0].verdict
    assert found is not None
    return found


def test_a_call_goes_on_when_all_have_made_it() -> None:
    verifier, released = judge(of(0, "all_reduce"), hold(0, 0), of(1, "all_reduce"), hold(1, 0), end(0), end(1))
    assert verifier.verdict is None and released == [[], [], [0], [1], [], []]
    assert not verifier.columns and [len(calls) for calls in verifier.ranks()] == [1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"op": "all_gather"},
        {"dtype": "int32"},
        {"shapes": ((2, 2),)},
        {"payload_bytes": 32, "shapes": ((8,),)},
        {"reduction": "max"},
        {"peer": 1},
        {"flags": ("sparse",)},
    ],
    ids=str,
)
def test_the_second_of_two_calls_that_differ_is_the_mismatch(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"reduction": "sum", "op": "all_reduce"}
    found = verdict(of(0, **fields), hold(0, 0), of(1, **fields), of(0, **fields), hold(0, 1), of(1, **fields | change))
    assert found.kind == "mismatch"
    assert found.text.startswith("group 0 (ranks 0, 1), call 2: rank 0: all_reduce(sum) float32 16 B [4] at a.py:10")
    assert f"; rank 1: {change.get('op', 'all_reduce')}" in found.text and " at b.py:" in found.text


def test_two_of_three_that_differ_need_not_wait_for_the_third() -> None:
    three = {"ranks": (0, 1, 2)}
    found = verdict(of(2, "broadcast", peer=0, **three), of(0, "broadcast", peer=2, **three), num_ranks=3)
    assert "rank 0: broadcast float32 16 B [4] root rank 2 at a.py:9; rank 2: broadcast" in found.text


def test_blocks_that_do_not_fit_are_a_mismatch() -> None:
    found = verdict(of(0, "all_to_all", to=(4, 12), by=(4, 8)), of(1, "all_to_all", to=(8, 8), by=(8, 8)))
    assert "rank 0: all_to_all float32 16 B [4] at a.py:10, bytes to each rank [4, 12], from each [4, 8]" in found.text
    assert (
        judge(of(0, "all_to_all", to=(4, 12), by=(4, 8)), of(1, "all_to_all", to=(8, 8), by=(12, 8)))[0].verdict is None
    )


def test_asynchronous_calls_on_two_groups_may_come_in_any_order() -> None:
    one, other = {"group": "1", "is_async": True}, {"group": "2", "is_async": True}
    calls = of(0, "all_reduce", **one), of(0, "all_reduce", **other), of(1, "all_reduce", **other)
    verifier, released = judge(*calls, hold(1, 0), hold(0, 0), of(1, "all_reduce", **one), hold(1, 1))
    assert verifier.verdict is None and released[3:] == [[1], [], [0], [1]]


def test_others_are_a_deadlock_and_who_waits_where_is_said() -> None:
    found = verdict(of(0, "all_reduce", group="1"), hold(0, 0), of(1, "all_reduce", group="2"), hold(1, 0))
    assert found.kind == "deadlock" and not found.failed
    assert "rank 0 waits in group 1 (ranks 0, 1), call 1: all_reduce float32 16 B [4] at a.py:10" in found.text
    assert "rank 1 waits in group 2 (ranks 0, 1), call 1: all_reduce" in found.text


def test_a_deadlock_of_some_is_found_while_others_run() -> None:
    found = verdict(
        of(0, "all_reduce", group="1"),
        hold(0, 0),
        of(1, "all_reduce", group="2", ranks=(0, 1)),
        of(2, "send", ranks=(0, 1, 2), peer=0),
        hold(1, 0),
        num_ranks=3,
    )
    assert "rank 2" not in found.text


def test_a_chain_of_waits_is_none_as_long_as_its_end_runs() -> None:
    chain = [of(0, "all_reduce", ranks=(0, 1)), hold(0, 0), of(1, "all_reduce", ranks=(1, 2), group="1"), hold(1, 0)]
    assert judge(*chain, num_ranks=3)[0].verdict is None
    found = verdict(*chain, end(2), num_ranks=3)
    assert (found.kind, found.text.count("waits in")) == (
        "deadlock",
        2,
    ) and "rank 2 has ended without a call" in found.text


def test_a_rank_that_has_ended_without_a_call_is_named() -> None:
    both = [of(0, "all_reduce"), of(1, "all_reduce")]
    for events in (
        [*both, of(0, "barrier"), hold(0, 1), end(1)],
        [*both, of(0, "barrier", is_async=True), end(1)],
        [*both, end(1), of(0, "barrier")],
    ):
        found = verdict(*events)
        assert found.kind == "mismatch" and not found.failed
        assert "call 2: rank 0: barrier" in found.text
        assert found.text.endswith(
            "rank 1: no such call, it has ended (its last: all_reduce float32 16 B [4] at b.py:10)"
        )
    assert verdict(*both, of(0, "barrier"), end(1, failed=True)).failed, "it has an error of its own to show"


MESSAGE: dict[str, Any] = {"group": "0", "ranks": (0, 1, 2)}


def test_messages_are_released_in_the_order_in_which_they_match() -> None:
    events = [
        of(0, "send", peer=1, **MESSAGE),
        hold(0, 0),
        of(1, "recv", peer=2, **MESSAGE),
        of(1, "recv", peer=0, **MESSAGE),
        hold(1, 1),
        of(0, "send", peer=1, **MESSAGE),
        of(2, "send", peer=1, **MESSAGE),
        hold(1, 0),
        hold(0, 1),
        of(1, "recv", peer=0, **MESSAGE),
    ]
    verifier, released = judge(*events, num_ranks=3)
    assert verifier.verdict is None and released == [[], [], [], [0], [1], [], [], [1], [], [0]]


@pytest.mark.parametrize("change", [{"payload_bytes": 8, "shapes": ((2,),)}, {"dtype": "int32"}], ids=str)
def test_messages_of_another_size_or_type_are_a_mismatch(change: dict[str, Any]) -> None:
    found = verdict(of(1, "recv", peer=0, **MESSAGE), hold(1, 0), of(0, "send", peer=1, **MESSAGE | change))
    assert found.text.startswith("message 1 from rank 0 to rank 1: rank 0: send")
    assert "; rank 1: recv float32 16 B [4] from rank 0 at b.py:4" in found.text


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_message_that_nobody_takes_or_sends_is_a_deadlock(op: str) -> None:
    found = verdict(of(1, "barrier", ranks=(1,)), of(0, op, peer=1, **MESSAGE), hold(0, 0), end(1), num_ranks=3)
    assert (
        found.kind == "deadlock" and f"message 1 {'to' if op == 'send' else 'from'} rank 1: {op} float32" in found.text
    )
    assert "rank 1 has ended (its last: barrier" in found.text


def test_sends_to_each_other_are_a_deadlock_and_with_receives_posted_are_none() -> None:
    found = verdict(of(0, "send", peer=1, **MESSAGE), hold(0, 0), of(1, "send", peer=0, **MESSAGE), hold(1, 0))
    assert found.text.count("waits in message 1 to rank") == 2
    events = [of(rank, op, peer=1 - rank, **MESSAGE) for rank in PAIR for op in ("recv", "send")]
    assert judge(*events, hold(0, 1), hold(1, 1), hold(0, 0), hold(1, 0))[0].verdict is None


def test_a_receive_from_anyone_waits_for_anyone() -> None:
    anyone = [of(0, "recv", peer=None, **MESSAGE), hold(0, 0)]
    wait = "call", 0, Call(0, "wait", of=0, peer=2)
    events = [*anyone, of(2, "send", peer=0, **MESSAGE), hold(2, 0), wait, of(0, "recv", peer=2, **MESSAGE), hold(0, 2)]
    verifier, released = judge(*events, num_ranks=3)
    assert verifier.verdict is None and released == [[], [], [0], [2], [], [], []]
    alone = [of(1, "barrier", ranks=(1,)), of(2, "barrier", ranks=(2,)), *anyone, end(1), end(2)]
    assert "rank 0 waits in message from any rank: recv" in verdict(*alone, num_ranks=3).text


def test_processes_that_come_later_are_waited_for_and_have_no_part_in_what_was_before() -> None:
    verifier = Verifier(1)
    verifier.begin("parent", 0)
    for generation in range(2):  # the parent starts two ranks, and when they have ended two more
        for rank in PAIR:
            key = (generation, rank)
            verifier.begin(key, None)
            verifier.call(key, of(rank, "all_reduce")[2], 0)
            verifier.hold(key, 0, 0)
            verifier.released()
        assert not any(process.held for process in verifier.processes.values())
        for rank in PAIR:
            verifier.end((generation, rank), False)
            verifier.released()
    assert verifier.verdict is None
    assert [len(calls) for calls in verifier.ranks()] == [2, 2]


def test_a_rank_that_does_not_come_in_time_is_stuck() -> None:
    for held in ([], [hold(0, 1)]):  # whether rank 0 waits where one can see it or not
        verifier, _ = judge(of(0, "all_reduce"), of(1, "all_reduce"), of(0, "barrier", is_async=True), *held)
        verifier.overdue(30, 31)
        assert verifier.verdict is None
        verifier.overdue(30, 34)
        assert verifier.verdict is not None and verifier.verdict.kind == "stuck"
        assert "group 0 (ranks 0, 1), call 2: barrier float32 16 B [4] at a.py:7" in verifier.verdict.text
        assert "rank 1 does not come (its last: all_reduce float32 16 B [4] at b.py:10)" in verifier.verdict.text
        assert verifier.verdict.running == ((1,) if held else (0, 1))


def test_a_process_says_where_it_is_but_for_one_that_is_stopped(tmp_path: Path) -> None:
    code = "import sys, time, shardiff.tracing.stacks as s; print(s.answer(sys.argv[1]), flush=True); time.sleep(99)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        file = process.stdout.readline().strip()
        assert "most recent call first" in ask([file])[process.pid]
        process.send_signal(signal.SIGSTOP)
        assert ask([file], patience=0.2) == {process.pid: "  it does not answer: it may be stopped"}
        process.kill()
    assert ask([file]) == {}, "it is gone"
