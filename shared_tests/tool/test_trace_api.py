"""`shardiff.trace`, `tracing` and `step`: what a program communicates, found out from Python."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardiff.program import Program
from shardiff.ranks.torch_pool import Workers
from shardiff.tracing import api
from shardiff.tracing.api import TraceError, step, trace, tracing
from shardiff.tracing.process import report, run
from shardiff.tracing.sending import receive, sendable
from shardiff.tracing.settings import Settings
from shardiff.tracing.traced import Traced


def train(explicit: bool) -> Program:
    """On each rank: two steps with two optimizers, after a broadcast and before a last sum; what all ranks did."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]

    def within(*_: Any) -> None:
        dist.broadcast(torch.zeros(3), 0)

    optimizers[1].register_step_post_hook(within)
    with tracing() as program:
        for p in model.parameters():
            dist.broadcast(p.detach(), 0)
        for _ in range(2):
            model(torch.full((1, 2), float(rank))).sum().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            for optimizer in optimizers:
                optimizer.step()
            if explicit:
                dist.all_reduce(torch.ones(5))
                step()
        dist.all_reduce(torch.ones(7))
    return program


def on_rank(device: torch.device) -> dict[str, Any]:
    """Everything that the tests ask of ranks, in one call."""
    with tracing(merge=False) as alone:
        dist.all_reduce(torch.ones(4))
    with pytest.raises(ZeroDivisionError), tracing() as failed:
        dist.all_reduce(torch.ones(4))
        raise ZeroDivisionError
    return {
        "optimizer": train(False),
        "explicit": train(True),
        "alone": (alone.label, alone.counts()),
        "failed": (failed.label, failed.counts()),
    }


@pytest.fixture(scope="module")
def on_ranks(pool: Workers) -> list[dict[str, Any]]:
    return pool.call(on_rank, world_size=2)


def test_inside_ones_own_ranks_all_ranks_are_merged_and_told_by_step(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        program = found["optimizer"]
        assert program.label == "2 ranks" and {r.groups for r in program} == {((0, 1),)}
        assert list(program.segments) == ["set-up", "step 1", "step 2", "rest"]
        assert [part.counts() for part in program.steps] == [{"all_reduce": 4, "broadcast": 1}] * 2, (
            "of both optimizers"
        )
        assert [r.phase for r in program.steps[1]] == ["backward"] * 4 + ["update"]
        assert program.segments["rest"].counts() == {"all_reduce": 1}


def test_a_mark_ends_a_step_in_place_of_the_optimizers(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert [part.counts() for part in found["explicit"].steps] == [{"all_reduce": 5, "broadcast": 1}] * 2


def test_alone_or_after_an_error_it_is_this_ranks_view(on_ranks: list[dict[str, Any]]) -> None:
    for found in on_ranks:
        assert found["alone"] == found["failed"] == ("this rank", {"all_reduce": 1})


def test_without_a_trace_a_mark_does_nothing() -> None:
    step()


def test_a_function_runs_on_ranks_of_its_own_by_its_code() -> None:
    class Double(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    width = 3

    def one_step(x: Tensor) -> None:
        model = Double(width)
        model(x).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)

    program = trace(one_step, torch.ones(1, width))
    assert [(r.op, r.phase, r.detail, r.groups) for r in program] == [
        ("all_reduce", "backward", "gradient of inner.weight", ((0, 1),)),
        ("all_reduce", "backward", "gradient of inner.bias", ((0, 1),)),
    ]


def test_a_function_that_fails_is_one_line() -> None:
    with pytest.raises(TraceError, match=r"fails failed on rank 0: ValueError: no") as caught:
        trace(fails, nproc=1)
    assert "\n" not in str(caught.value)


def fails() -> None:
    raise ValueError("no")


def test_functions_and_classes_that_cannot_be_imported_are_sent_by_their_code() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    class Base:
        def __init__(self, x: int) -> None:
            self.x = x

    class Derived(Base):
        def __init__(self, x: int) -> None:
            super().__init__(x + 1)

        @staticmethod
        def twice(x: int) -> int:
            return 2 * x

        @property
        def square(self) -> int:
            return self.x**2

    def use(x: int, *, add: int = 1) -> tuple[Any, ...]:
        made = Derived(x)
        return made.square, made.twice(x), even(x), isinstance(made, Base), add, warnings.__name__

    function, arguments = receive(sendable(use, (2,)))
    assert function is not use and function(*arguments) == use(2) == (9, 4, True, True, 1, "warnings")
    assert receive(sendable(train, ()))[0] is train, "by its name"
    assert receive(sendable(lambda: 5, ()))[0]() == 5


def test_what_cannot_be_sent_is_refused_in_one_line() -> None:
    held = open(__file__)  # noqa: SIM115
    with held, pytest.raises(ValueError, match=r"cannot be sent to other processes, with all that it uses: ") as caught:
        trace(lambda: held.read())
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="a function is traced, got int"):
        trace(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nproc must be at least 1"):
        trace(fails, nproc=0)


def test_the_rank_that_failed_first_is_named_and_not_one_that_lost_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = {1: "RuntimeError: boom", 0: "RuntimeError: Connection closed by peer"}
    ended = Traced(1, None, 2, Program(()), [], [], [], raised, [[], []])
    monkeypatch.setattr(api, "trace_program", lambda *_: ended)
    with pytest.raises(api.TraceError, match="^fails failed on rank 1: RuntimeError: boom$"):
        trace(fails)


def test_an_error_of_syntax_has_no_frame_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error))
    (tmp_path / "train.py").write_text("def f(:")
    given = Settings("", "", False, "script", str(tmp_path / "train.py"))
    with pytest.raises(SyntaxError) as caught:
        run(given, {})
    error = caught.value
    assert error.__traceback__ is not None
    report(error.with_traceback(error.__traceback__.tb_next), given)
    assert shown == [(SyntaxError, error, None)]
