"""An operator of torch.distributed, as the dispatcher sees it, read as a Call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardiff.ranks.c10d import C10D, FUNCTIONAL
from shardiff.ranks.torch_versions import group_named
from shardiff.record import Part
from shardiff.tracing.calls import Call, filled, made
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


@dataclass(frozen=True)
class Group:
    """What is known of a process group. ranks: the global ones of its members; rank: this process's. axis: what it is
    called, if anything."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    axis: str | None


@dataclass(frozen=True)
class Asked:
    """A method of a process group that Python has called, which runs an operator: the group, and the method's options.
    They say what the operator's arguments say, which are objects of TorchScript and take long to read."""

    group: dist.ProcessGroup
    options: Any


def calls_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    at: Where,
    asked: Asked | None,
    know: Callable[[dist.ProcessGroup], Group],
    unseen: Callable[[str], object],
) -> list[Call]:
    """What an operator of one of the namespaces OPERATORS communicates: one call, or none, or a batch of messages.

    at: where it is called. asked: by which method, if by one. know: what is known of a group. unseen: is told of an
    operator that is not known.
    """
    name = short_name(func)
    if name in SILENT:
        return []
    bound, known = bind(func, args, kwargs), OPERATORS[func.namespace].get(name)
    tensors = tensors_in(list(bound.values())[known[1]] if known else list(bound.values()))
    for t in tensors:
        if is_fake(t):
            return []
    if known is None and name != "batch_p2p_ops":
        unseen(str(func))
        return []
    group = know(asked.group if asked else group_of(bound))
    if known is None:
        columns = zip(bound["op_list"], bound["peer_list"], bound["tag_list"], bound["tensors"], strict=True)
        calls = [
            call_of(func.namespace, op, {"tensor": t, "peer": peer, "tag": tag}, [t], at, None, group)
            for op, peer, tag, t in columns
        ]
        return [filled(call, batched=True) for call in calls]
    return [call_of(func.namespace, name, bound, tensors, at, asked, group)]


def call_of(
    space: str,
    name: str,
    bound: Mapping[str, Any],
    tensors: Sequence[Tensor],
    at: Where,
    asked: Asked | None,
    group: Group,
) -> Call:
    """One call. bound: the operator's arguments by name, in the order of its schema; tensors: those that it moves."""
    op, _, once_per_rank = OPERATORS[space][name]
    ranks, message = group.ranks, op in ("send", "recv")
    more: dict[str, Any] = {"group": group.name, "ranks": ranks, "axis": group.axis, "source": at.source}
    for key in ("root_rank", "src", "dst", "peer"):
        if (peer := bound.get(key)) is not None:
            more["peer"] = peer if message and space != "c10d" else ranks[peer]  # those have global ranks already
            break
    # Messages have no such argument: dist.send waits, dist.isend does not. Functional collectives are waited for
    # by an operator of their own.
    wanted = bound.get("async_op", bound.get("asyncOp"))
    more["is_async"] = not at.functions & {"send", "recv"} if wanted is None else bool(wanted)
    if message:
        more["tag"] = bound["tag"]
        more["batched"] = bool(at.functions & {"batch_isend_irecv", "_coalescing_manager"})
    if "reduce_op" in bound:
        more["reduction"] = reduction(bound, asked)
    if op == "barrier":  # a monitored one waits for all, and does not fit any other
        if "monitored" in name:
            more |= {"is_async": False, "flags": ("monitored",)}
        return made(group.rank, op, **more)
    dtypes = [dtype_name(t.dtype) for t in tensors]
    sizes = [num_bytes(t) * (len(ranks) if once_per_rank else 1) for t in tensors]
    if "coalesced" in name and len(tensors) > 1:
        more["parts"] = tuple(map(Part, dtypes, sizes))
    more["to"], more["by"] = blocks(name, bound, len(ranks))
    for t in tensors:
        if t.layout != torch.strided:
            more["flags"] = ("sparse",)
    more["dtype"] = dtypes[0] if len(set(dtypes)) == 1 else "+".join(dict.fromkeys(dtypes))
    more["payload_bytes"], more["shapes"] = sum(sizes), tuple([tuple(t.shape) for t in tensors])
    return made(group.rank, op, **more)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reduction(bound: Mapping[str, Any], asked: Asked | None) -> str | None:
    """sum, avg, max, ...: functional collectives have it as text, the others as an object with the number of one."""
    value = bound.get("reduce_op")
    if value is None or isinstance(value, str):
        return value and value.lower()
    told = getattr(asked.options, "reduceOp", None) if asked else None
    if told is not None:
        return reductions().get(int(told.op))
    return reductions().get(value.op()) if hasattr(value, "op") else None


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
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def ranks_of(group: dist.ProcessGroup) -> tuple[tuple[int, ...], int]:
    """The global ranks of a group, and this process's."""
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except KeyError:  # made without dist.new_group: it has no global ranks
        ranks = tuple(range(group.size()))
    return ranks, ranks[group.rank()]
