"""Every kind of call of torch.distributed is traced as one record, with its bytes, ranks and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from shardiff.ranks.supervisor import Workers
from shardiff.record import Part
from shardiff.tracing.calls import Call
from shardiff.tracing.dispatch import Tracer
from shardiff.tracing.merge import merge
from shardiff.tracing.tracer import capture
from shared_tests.tool.rank_functions import started


def _batch(rank: int, x: Tensor) -> None:
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _coalesced(x: Tensor) -> None:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(torch.ones(2))
    manager.wait()


def _backward(x: Tensor) -> None:
    x.square().sum().backward()  # whose gradient is contiguous, as torch 2.11 demands


def _functional_message(rank: int, x: Tensor) -> None:
    operators = torch.ops._c10d_functional
    if rank == 0:
        sent = operators.isend(x, 1, 0, "0")
        operators.wait_tensor(sent)
        operators.wait_tensor(operators.irecv(torch.empty(4), 1, 0, "0"))
    else:
        operators.wait_tensor(operators.irecv(torch.empty(4), 0, 0, "0"))
        operators.wait_tensor(operators.isend(x, 0, 0, "0"))


def _uneven(rank: int) -> None:  # rank 0 keeps 1 row and sends 2; rank 1 sends 3 and keeps none
    send, receive = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    dist.all_to_all_single(torch.empty(sum(receive), 2), torch.ones(sum(send), 2), receive, send)


# Every kind of call, made by both ranks r of a group g; x is 4 float32, 16 bytes. -> op, payload and is_async of each
# record that comes of it.
CALLS: dict[str, tuple[Callable[[int, Tensor, Any], Any], list[tuple[str, int, bool]]]] = {
    "all_reduce": (lambda r, x, g: dist.all_reduce(x), [("all_reduce", 16, False)]),
    "all_reduce async": (lambda r, x, g: started(dist.all_reduce(x, async_op=True)).wait(), [("all_reduce", 16, True)]),
    "all_reduce coalesced": (lambda r, x, g: dist.all_reduce_coalesced([x, x[:3]]), [("all_reduce", 28, False)]),
    "coalescing manager": (lambda r, x, g: _coalesced(x), [("all_reduce", 24, True)]),
    "all_gather into": (lambda r, x, g: dist.all_gather_into_tensor(torch.empty(8), x), [("all_gather", 32, False)]),
    "all_gather list": (lambda r, x, g: dist.all_gather([x.clone(), x.clone()], x), [("all_gather", 32, False)]),
    "all_gather coalesced": (
        lambda r, x, g: g.allgather_into_tensor_coalesced([torch.empty(8), torch.empty(2)], [x, x[:1]]).wait(),
        [("all_gather", 40, True)],
    ),
    "reduce_scatter into": (
        lambda r, x, g: dist.reduce_scatter_tensor(torch.empty(2), x),
        [("reduce_scatter", 16, False)],
    ),
    "reduce_scatter list": (
        lambda r, x, g: dist.reduce_scatter(torch.empty(4), [x, x.clone()]),
        [("reduce_scatter", 32, False)],
    ),
    "all_to_all single": (
        lambda r, x, g: dist.all_to_all_single(torch.empty(4), x),
        [("all_to_all", 16, False)],
    ),
    "all_to_all uneven": (lambda r, x, g: _uneven(r), [("all_to_all", 24, False)]),
    "broadcast": (lambda r, x, g: dist.broadcast(x, 1), [("broadcast", 16, False)]),
    "reduce": (lambda r, x, g: dist.reduce(x, 1), [("reduce", 16, False)]),
    "gather": (
        lambda r, x, g: dist.gather(x, [x.clone(), x.clone()] if r == 1 else None, 1),
        [("gather", 32, False)],
    ),
    "scatter": (
        lambda r, x, g: dist.scatter(torch.empty(4), [x, x.clone()] if r == 0 else None, 0),
        [("scatter", 32, False)],
    ),
    "barrier": (lambda r, x, g: dist.barrier(), []),
    "monitored barrier": (lambda r, x, g: dist.monitored_barrier(), []),
    "objects": (
        lambda r, x, g: dist.all_gather_object([None, None], "text"),
        [("all_gather", 16, False), ("all_gather", 38, False)],  # the sizes, and the pickles
    ),
    "send": (
        lambda r, x, g: dist.send(x, 1) if r == 0 else dist.recv(torch.empty(4), 0),
        [("collective_permute", 16, False)],
    ),
    "receive from any": (
        lambda r, x, g: dist.send(x, 0, tag=3) if r else dist.recv(x, tag=3),
        [("collective_permute", 16, False)],
    ),
    "isend": (
        lambda r, x, g: started(dist.isend(x, 1) if r == 0 else dist.irecv(torch.empty(4), 0)).wait(),
        [("collective_permute", 16, True)],
    ),
    "batch": (lambda r, x, g: _batch(r, x), [("collective_permute", 16, True)]),
    "functional all_reduce": (lambda r, x, g: functional.all_reduce(x, "sum", g) + 1, [("all_reduce", 16, True)]),
    "functional all_gather": (
        lambda r, x, g: functional.all_gather_tensor(x, 0, g) + 1,
        [("all_gather", 32, True)],
    ),
    "functional reduce_scatter": (
        lambda r, x, g: functional.reduce_scatter_tensor(x, "sum", 0, g) + 1,
        [("reduce_scatter", 16, True)],
    ),
    "functional broadcast": (lambda r, x, g: functional.broadcast(x, 1, g) + 1, [("broadcast", 16, True)]),
    "functional all_to_all": (
        lambda r, x, g: functional.all_to_all_single(x, None, None, g) + 1,
        [("all_to_all", 16, True)],
    ),
    "functional coalesced": (
        lambda r, x, g: [t + 1 for t in functional.all_gather_into_tensor_coalesced([x, x[:1]], g)],
        [("all_gather", 40, True)],
    ),
    "functional all_reduce coalesced": (
        lambda r, x, g: [t + 1 for t in functional.all_reduce_coalesced([x, x[:1]], "sum", g)],
        [("all_reduce", 20, True)],
    ),
    "functional reduce_scatter coalesced": (
        lambda r, x, g: [t + 1 for t in functional.reduce_scatter_tensor_coalesced([x, x[:2]], "sum", [0, 0], g)],
        [("reduce_scatter", 24, True)],
    ),
    "functional autograd": (
        lambda r, x, g: _backward(functional.all_gather_tensor_autograd(x.clone().requires_grad_(), 0, g)),
        [("all_gather", 32, True), ("reduce_scatter", 32, True)],
    ),
    "functional messages": (
        lambda r, x, g: _functional_message(r, x),
        [("collective_permute", 16, True), ("collective_permute", 16, True)],
    ),
}
if not hasattr(torch.ops._c10d_functional, "isend"):  # before torch 2.13
    del CALLS["functional messages"]


def make_calls(device: torch.device) -> dict[str, list[Call] | str]:
    """On each rank: the calls that each of CALLS makes, or the error."""
    traced: dict[str, list[Call] | str] = {}
    for name, (make, _) in CALLS.items():
        try:
            with capture() as calls:
                make(dist.get_rank(), torch.ones(4), dist.group.WORLD)
            traced[name] = calls
        except Exception as error:
            traced[name] = repr(error)
    return traced


@pytest.fixture(scope="module")
def calls_made(pool: Workers) -> list[dict[str, list[Call]]]:
    return pool.call(make_calls, world_size=2)


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_is_one_record_with_its_bytes(name: str, calls_made: list[dict[str, list[Call]]]) -> None:
    errors = [rank[name] for rank in calls_made if isinstance(rank[name], str)]
    assert not errors
    records = merge([rank[name] for rank in calls_made])
    assert [(r.op, r.payload_bytes, r.is_async) for r in records] == CALLS[name][1]
    for r in records:
        assert r.source is not None and r.source.startswith("shared_tests/tool/test_trace_calls.py:")
        assert r.dtype in ("float32", "int64", "uint8")
        assert r.edges if r.op == "collective_permute" else r.groups == ((0, 1),)


@pytest.mark.parametrize("name", CALLS)
def test_what_reduces_says_how(name: str, calls_made: list[dict[str, list[Call]]]) -> None:
    for call in (call for rank in calls_made for call in rank[name]):
        assert call.reduction == ("sum" if "reduce" in call.op else None)


def test_coalesced_calls_have_parts(calls_made: list[dict[str, list[Call]]]) -> None:
    [merged] = merge([rank["all_reduce coalesced"] for rank in calls_made])
    assert merged.parts == (Part("float32", 16), Part("float32", 12))


def test_a_batch_that_nccl_coalesces_is_waited_for_by_its_one_work() -> None:
    tracer = Tracer(None, lambda call: None, lambda position: None)
    fields: dict[str, Any] = {"ranks": (0, 1), "peer": 1, "is_async": True}
    tracer.batch_begins()
    tracer.expect(None, [tracer.add(Call(0, op, **fields)) for op in ("send", "recv", "recv")])
    work = dist.Work()
    tracer.batch_ends("_end_coalescing", None, work)
    tracer.work_awaited("is_completed", work, False)
    assert [call.op for call in tracer.calls] == ["send", "recv", "recv"]
    tracer.work_awaited("wait", work, True)
    assert [(call.op, call.of) for call in tracer.calls[3:]] == [("wait", 1), ("wait", 2)]
