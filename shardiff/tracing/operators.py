"""An operator of torch.distributed, as the dispatcher sees it, read as a Call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardiff.ranks.c10d import C10D, FUNCTIONAL
from shardiff.ranks.torch_versions import group_named
from shardiff.record import Part
from shardiff.tracing.calls import Call, filled
from shardiff.tracing.where import Where

# Operators by their names without the trailing underscore.
OPERATORS = {
    "c10d": C10D,
    "_c10d_functional": FUNCTIONAL,
    "_c10d_functional_autograd": FUNCTIONAL,  # seen where nothing is differentiated; else taken apart before
    "symm_mem": {},
    # A collective that a program has put together of messages, and registered under this name, which are not seen.
    "shardiff": {"all_gather_coalesced": C10D["allgather_into_tensor_coalesced"]},
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")  # no communication of their own


def bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """An operator's arguments by their names in its schema, in its order."""
    given = len(args)
    return {
        name: args[i] if i < given else kwargs.get(name, default) for i, (name, default) in enumerate(parameters(func))
    }


@cache
def parameters(func: Any) -> tuple[tuple[str, Any], ...]:
    """The names and defaults of an operator's arguments."""
    return tuple((a.name, a.default_value) for a in func._schema.arguments)


def calls_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    at: Where,
    axis: Callable[[dist.ProcessGroup], str | None],
    unseen: Callable[[str], object],
) -> list[Call]:
    """What an operator of one of the namespaces OPERATORS communicates: one call, or none, or a batch of messages.

    at: where it is called. axis: what a group is called. unseen: is told of an operator that is not known.
    """
    name, bound = short_name(func), bind(func, args, kwargs)
    if name in SILENT or any(map(is_fake, tensors_in(list(bound.values())))):
        return []
    if name == "batch_p2p_ops":
        columns = zip(bound["op_list"], bound["peer_list"], bound["tag_list"], bound["tensors"], strict=True)
        group = bound["group_name"]
        calls = [
            call_of(func.namespace, op, {"tensor": t, "peer": peer, "tag": tag, "group_name": group}, at, axis)
            for op, peer, tag, t in columns
        ]
        return [filled(call, batched=True) for call in calls]
    if name not in OPERATORS[func.namespace]:
        unseen(str(func))
        return []
    return [call_of(func.namespace, name, bound, at, axis)]


def call_of(
    space: str, name: str, bound: Mapping[str, Any], at: Where, axis: Callable[[dist.ProcessGroup], str | None]
) -> Call:
    """One call. bound: the operator's arguments by name, in the order of its schema."""
    op, position, once_per_rank = OPERATORS[space][name]
    group = group_of(bound)
    ranks, me = ranks_of(group)
    tensors = tensors_in(list(bound.values())[position])
    peer = next((bound[key] for key in ("root_rank", "src", "dst", "peer") if key in bound), None)
    if peer is not None and not (space != "c10d" and op in ("send", "recv")):  # those have global ranks already
        peer = ranks[peer]
    call = Call(
        me,
        op,
        group=group.group_name,
        ranks=ranks,
        peer=peer,
        tag=bound.get("tag", 0),
        reduction=reduction(bound.get("reduce_op")),
        axis=axis(group),
        # Messages have no such argument: dist.send waits, dist.isend does not. Functional collectives are waited for
        # by an operator of their own.
        is_async=bool(bound.get("async_op", bound.get("asyncOp", not at.functions & {"send", "recv"}))),
        source=at.source,
        batched=op in ("send", "recv") and bool(at.functions & {"batch_isend_irecv", "_coalescing_manager"}),
    )
    if op == "barrier":  # a monitored one waits for all, and does not fit any other
        return filled(call, is_async=False, flags=("monitored",)) if "monitored" in name else call
    to, by = blocks(name, bound, len(ranks))
    dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors]
    sizes = [num_bytes(t) * (len(ranks) if once_per_rank else 1) for t in tensors]
    combined = "coalesced" in name and len(tensors) > 1
    return filled(
        call,
        dtype="+".join(dict.fromkeys(dtypes)),
        payload_bytes=sum(sizes),
        parts=tuple(map(Part, dtypes, sizes)) if combined else (),
        shapes=tuple(tuple(t.shape) for t in tensors),
        to=to,
        by=by,
        flags=("sparse",) if any(t.layout != torch.strided for t in tensors) else (),
    )


def reduction(value: Any) -> str | None:
    """sum, avg, max, ...: functional collectives have it as text, the others as an object with the number of one."""
    if value is None or isinstance(value, str):
        return value and value.lower()
    return reductions().get(value.op()) if "op" in value._method_names() else None


@cache
def reductions() -> dict[int, str]:
    """The names of reductions by their numbers."""
    kinds: Any = dist.ReduceOp.RedOpType
    return {int(member): name.lower() for name, member in kinds.__members__.items()}


def blocks(name: str, bound: Mapping[str, Any], n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes to and from each rank of the group where the operator says so; empty where all blocks are even."""
    if name == "alltoall":
        return tuple(map(num_bytes, bound["input_tensors"])), tuple(map(num_bytes, bound["output_tensors"]))
    if name == "allgather":
        [mine], [all_of_them] = bound["input_tensors"], bound["output_tensors"]
        sizes = tuple(map(num_bytes, all_of_them))
        return ((num_bytes(mine),) * n, sizes) if set(sizes) != {num_bytes(mine)} else ((), ())
    if name in ("alltoall_base", "all_to_all_single"):
        to = split_bytes(bound["input"], bound["input_split_sizes"], n)
        by = split_bytes(bound.get("output", bound["input"]), bound["output_split_sizes"], n)
        return (to, by) if len({*to, *by}) > 1 else ((), ())
    return (), ()


def split_bytes(t: Tensor, rows: Sequence[int], n: int) -> tuple[int, ...]:
    """The bytes of splits along the first dim, one for each of n ranks; without rows they are even."""
    row = math.prod(t.shape[1:]) * t.element_size()
    return tuple(int(count) * row for count in rows or [t.shape[0] // n] * n)


def num_bytes(t: Tensor) -> int:
    """As nccl-tests count: of a sparse tensor, what it would be if dense."""
    return t.numel() * t.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in an argument."""
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []


def is_fake(t: Tensor) -> bool:
    """Whether it has no data, as when a compiler only asks for shapes: then nothing is sent."""
    return t.is_meta or type(t).__name__ in ("FakeTensor", "FunctionalTensor")


@cache
def short_name(func: Any) -> str:
    """c10d::allreduce_ -> allreduce."""
    return func._schema.name.partition("::")[2].rstrip("_")


def group_of(bound: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group that an operator was given: as such, boxed for TorchScript, or by name."""
    group = bound["process_group"] if "process_group" in bound else bound["group_name"]
    if isinstance(group, str):
        return group_named(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)  # type: ignore[attr-defined]


def ranks_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], int]:
    """The global ranks of a group, and this process's."""
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except KeyError:  # made without dist.new_group: it has no global ranks
        ranks = tuple(range(group.size()))
    return ranks, ranks[group.rank()]
