"""Calls that do not fit are found before they block, named with both sides, and nothing else is. Two ranks run."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contract.axes import STRATEGIES, one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.ranks.supervisor import Workers
from shardiff.tracing.calls import Call
from shardiff.tracing.link import Link, Server, StoppedError, serve
from shardiff.tracing.merge import MismatchError, merge
from shardiff.tracing.tracer import capture
from shardiff.tracing.verifier import Verdict
from shared_tests.tool.rank_functions import started
from torch_impl.traced import trace_rank

# Mistakes made for real, by two ranks r in a new group g; x is 4 float32. -> kind of verdict, and texts in it. No
# rank may come back from a call that does not fit.
MISTAKES: dict[str, tuple[Callable[[int, Any, Tensor], Any], str, list[str]]] = {
    "op": (
        lambda r, g, x: dist.broadcast(x, 0, g) if r else dist.all_reduce(x, group=g),
        "mismatch",
        ["rank 0: all_reduce(sum) float32 16 B [4] at", "rank 1: broadcast float32 16 B [4] root rank 0 at"],
    ),
    "shape": (
        lambda r, g, x: dist.all_reduce(x[r:], group=g),
        "mismatch",
        ["rank 0: all_reduce(sum) float32 16 B [4] at", "rank 1: all_reduce(sum) float32 12 B [3] at"],
    ),
    "dtype of the same size": (
        lambda r, g, x: dist.all_gather([x.int() if r else x] * 2, x.int() if r else x, group=g),
        "mismatch",
        ["rank 0: all_gather float32 32 B", "rank 1: all_gather int32 32 B"],
    ),
    "reduction": (
        lambda r, g, x: dist.all_reduce(x, dist.ReduceOp.MAX if r else dist.ReduceOp.SUM, group=g),
        "mismatch",
        ["rank 0: all_reduce(sum) float32", "rank 1: all_reduce(max) float32"],
    ),
    "reduce_scatter of other shapes": (
        lambda r, g, x: dist.reduce_scatter(x[: 4 - r], [x[: 4 - r]] * 2, group=g),
        "mismatch",
        ["rank 0: reduce_scatter(sum) float32 32 B [4] [4] at", "rank 1: reduce_scatter(sum) float32 24 B [3] [3] at"],
    ),
    "all_to_all splits": (
        lambda r, g, x: dist.all_to_all_single(torch.empty(4), x, [2, 2] if r else [1, 3], [2, 2] if r else [1, 3], g),
        "mismatch",
        ["bytes to each rank [4, 12], from each [4, 12]", "bytes to each rank [8, 8], from each [8, 8]"],
    ),
    "root": (
        lambda r, g, x: dist.broadcast(x, r, g),
        "mismatch",
        ["rank 0: broadcast float32 16 B [4] root rank 0 at", "rank 1: broadcast float32 16 B [4] root rank 1 at"],
    ),
    "order": (
        lambda r, g, x: (
            (dist.barrier(g), dist.all_reduce(x, group=g))[::-1]
            if r == 0
            else (dist.all_reduce(x, group=g), dist.barrier(g))
        ),
        "mismatch",
        ["call 1: rank 0: barrier at", "rank 1: all_reduce(sum) float32"],
    ),
    "group": (
        lambda r, g, x: dist.all_reduce(x, group=g if r else dist.group.WORLD),
        "deadlock",
        ["rank 0 waits in group 0 (ranks 0, 1), call ", "rank 1 waits in group "],
    ),
    "missing call": (
        lambda r, g, x: r or dist.barrier(g),
        "deadlock",
        ["rank 0 waits in group", "barrier at", "rank 1 has ended without a call"],
    ),
    "message of another size": (
        lambda r, g, x: dist.recv(x[:2], 0, g) if r else dist.send(x, 1, g),
        "mismatch",
        ["rank 0: send float32 16 B [4] to rank 1 at", "rank 1: recv float32 8 B [2] from rank 0 at"],
    ),
    "message of another type": (
        lambda r, g, x: dist.recv(x.int(), 0, g) if r else dist.send(x, 1, g),
        "mismatch",
        ["rank 0: send float32 16 B [4] to rank 1 at", "rank 1: recv int32 16 B [4] from rank 0 at"],
    ),
    "send to nobody": (
        lambda r, g, x: r or dist.send(x, 1, g),
        "deadlock",
        ["rank 0 waits in message 1 to rank 1: send float32 16 B [4] to rank 1 at", "rank 1 has ended without a call"],
    ),
    "receive from nobody": (
        lambda r, g, x: r or dist.recv(x, group=g),
        "deadlock",
        ["rank 0 waits in message from any rank: recv float32 16 B [4] at", "rank 1 has ended without a call"],
    ),
    "sends to each other": (
        lambda r, g, x: (dist.send(x, 1 - r, g), dist.recv(x, 1 - r, g)),
        "deadlock",
        ["rank 0 waits in message 1 to rank 1: send", "rank 1 waits in message 1 to rank 0: send"],
    ),
}


@contextmanager
def verified(path: str, rank: int) -> Iterator[list[str]]:
    """On a rank: all calls inside are verified. Gives a list, to which the verifier's objection is added."""
    objections: list[str] = []
    try:
        link = Link(path, str(Path(path).parent), rank)
        try:
            with capture(tell=link.tell, hold=link.hold):
                yield objections
        finally:
            link.end(well=True)
    except StoppedError as error:
        objections.append(str(error))


def make_mistakes(device: torch.device, directory: str) -> list[bool]:
    """On each rank: whether each of MISTAKES ended without an objection."""
    quiet = []
    for i, (make, *_) in enumerate(MISTAKES.values()):
        group = dist.new_group([0, 1])
        with verified(f"{directory}/{i}", dist.get_rank()) as objections:
            make(dist.get_rank(), group, torch.ones(4))
        quiet.append(not objections)
    return quiet


def serve_each(servers: list[Server], found: list[Verdict | None]) -> None:
    """Each server until its verdict or its end."""
    for server in servers:
        while not (verdict := server.step(0.1)) and not server.idle():
            pass
        found.append(verdict)
        server.close()


@contextmanager
def served(directory: Path, num: int) -> Iterator[tuple[list[Server], list[Verdict | None]]]:
    """Servers at directory/0, 1, ... for two processes each; their verdicts are there after the `with`."""
    found: list[Verdict | None] = []
    with ExitStack() as stack:
        servers = [stack.enter_context(serve(str(directory / str(i)), 2, 60)) for i in range(num)]
        thread = threading.Thread(target=serve_each, args=(servers, found), daemon=True)
        thread.start()
        yield servers, found
        thread.join(60)


Outcome = tuple[Verdict | None, list[list[Call]], list[bool]]


@pytest.fixture(scope="module")
def mistakes(pool: Workers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The verdict on each of MISTAKES, all that was called, and which ranks ended as if nothing was."""
    directory = tmp_path_factory.mktemp("v")
    with served(directory, len(MISTAKES)) as (servers, found):
        quiet = pool.call(make_mistakes, str(directory), world_size=2)
    calls = [server.verifier.ranks() for server in servers]
    return {name: (found[i], calls[i], [rank[i] for rank in quiet]) for i, name in enumerate(MISTAKES)}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_stopped_before_it_blocks_and_both_sides_are_named(
    name: str, mistakes: dict[str, Outcome]
) -> None:
    _, kind, texts = MISTAKES[name]
    found, calls, quiet = mistakes[name]
    assert found is not None and found.kind == kind
    assert all(text in found.text for text in texts), found.text
    lines = {call.source for rank in calls for call in rank if call.op != "mark"}
    assert lines and all(line and f"at {line}" in found.text for line in lines)
    assert quiet == ([False, True] if "without a call" in found.text else [False, False])
    assert all(f"at {line}" in "".join(merge_problems(calls)) for line in lines), "in a trace too"


def call_soundly(device: torch.device, directory: str) -> tuple[list[str], int]:
    """On each rank: what the verifier objects to in sound programs; and how many kinds of call were made."""
    every_call, library = (importlib.import_module(f"shared_tests.tool.test_trace{name}") for name in ("_calls", ""))
    rank, groups = dist.get_rank(), [dist.new_group([0, 1]) for _ in range(2)]
    alone = [dist.new_group([i]) for i in range(2)][rank]
    x = torch.ones(4)
    with verified(f"{directory}/0", rank) as objections:
        made = every_call.make_calls(device)
        for strategy in STRATEGIES:
            trace_rank(device, Run("torch", one_axis(strategy, 2), Problem(8, 8, 4), device="cpu"))
        for name in library.LIBRARIES.keys() - {"compile"}:
            library.trace_library(device, name)
        works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups[:: 1 - 2 * rank]]
        for work in works:
            started(work).wait()
        dist.all_reduce(x, group=alone)
        posted = [dist.irecv(torch.empty(size), 1 - rank, tag=size) for size in (2, 3)]
        sent = [dist.isend(torch.ones(size), 1 - rank, tag=size) for size in ((2, 3), (3, 2))[rank]]
        for work in (*sent, *posted[::-1]):
            started(work).wait()
        got = [None]
        dist.scatter_object_list(got, ["a", "b" * 99] if rank == 0 else None, src=0)
        dist.broadcast_object_list(got, src=1)
        dist.barrier()
    return [*objections, *(f"{name}: {calls}" for name, calls in made.items() if isinstance(calls, str))], len(made)


def test_sound_programs_are_not_objected_to(pool: Workers, tmp_path: Path) -> None:
    with served(tmp_path, 1) as (servers, found):
        results = pool.call(call_soundly, str(tmp_path), world_size=2)
    assert found == [None]
    assert [objections for objections, _ in results] == [[], []] and all(num > 30 for _, num in results)
    assert not merge_problems(servers[0].verifier.ranks())
    assert not servers[0].verifier.columns


def merge_problems(ranks: list[list[Call]]) -> list[str]:
    try:
        merge(ranks)
    except MismatchError as error:
        return error.disagreements
    return []
