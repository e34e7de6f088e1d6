"""From the statements of a program that may communicate to one record for each collective."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardiff.hlo.errors import HloError, display, shown
from shardiff.hlo.flow import Flow, is_synchronous
from shardiff.hlo.groups import Groups, device_edges, device_groups, id_lists
from shardiff.hlo.instruction import Instruction, Leaf, dtype_name, find, instruction, leaves, source_of
from shardiff.hlo.operands import argument_of, concatenated, is_slice_in_zeros, op_name_of, origin, reduction_of
from shardiff.hlo.phases import MAX_CALLERS, Phases, names_of
from shardiff.hlo.text import Program, Statement
from shardiff.record import Part, Record, wire_bytes

OPS = {
    "all-reduce": "all_reduce",
    "cross-replica-sum": "all_reduce",  # its name until 2019
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "broadcast",
    "send": "collective_permute",
    "recv": "collective_permute",
}
COLLECTIVES = frozenset(OPS) | frozenset(f"{opcode}-start" for opcode in OPS)
CALLS = frozenset(
    ("while", "conditional", "call", "fusion", "custom-call", "async-start")
    + ("call-start", "fusion-start", "custom-call-start")
)
GLOBAL_IDS = ("all-reduce", "all-gather", "reduce-scatter", "cross-replica-sum")  # those with use_global_device_ids
MODES = ("cross_replica", "cross_partition", "cross_replica_and_partition", "flattened_id")
OUTER = re.compile(r"^p?jit\(\w*\)/(?=.)")
PAIRS = "_xla_send_recv_source_target_pairs"
ASYNC_DONE = "AsyncCollectiveDone"  # the custom call at the end of a TPU's asynchronous collective
Place = tuple[str, str]  # a computation, and the name of an instruction in it


@dataclass(frozen=True)
class Context:
    """What a record needs beside its instruction. repeated: gathers of what another gather has gathered as well.
    unsplit: for computations that have been asked for, by the names of operands, the op_name of a sort that reads it.
    """

    program: Program
    flow: Flow
    phases: Phases
    frames: dict[str, str]
    replicas: int
    partitions: int
    repeated: dict[Place, Place] = field(default_factory=dict)
    unsplit: dict[str, dict[str, str]] = field(default_factory=dict)


def collectives(context: Context, found: list[tuple[str, Statement]]) -> Iterator[Record]:
    """The records of the statements in `found`, without those that ENTRY does not reach or that repeat another."""
    program, flow = context.program, context.flow
    sites = [(name, instruction(program.text, where)) for name, where in found if name in flow.executions]
    sent = {channel(site) for _, site in sites if site.opcode == "send"}
    context = replace(context, repeated=repeated(context, sites))
    chains = set()
    for computation, site in sites:
        if site.opcode in ("send", "recv") and is_host_transfer(site):
            continue
        if site.opcode == "recv" and channel(site) in sent:
            continue
        if (key := chain_of(flow, computation, site)) is not None:
            if key in chains:
                continue
            chains.add(key)
        try:
            yield collective(context, computation, site)
        except HloError as problem:
            raise HloError(f"instruction {shown(site.name)}: {problem}") from None


def collective(context: Context, computation: str, site: Instruction) -> Record:
    """The record of one instruction. Raises HloError."""
    flow, replicas, partitions = context.flow, context.replicas, context.partitions
    opcode = site.opcode.removesuffix("-start")
    is_start = site.opcode != opcode
    op = OPS[opcode]
    if opcode == "all-reduce" and is_scatter_fusion(flow, computation):
        op = "reduce_scatter"
    mode = group_mode(site, opcode)
    groups, group_size, edges = None, None, None
    if op == "collective_permute":
        pairs = site.attributes.get("source_target_pairs") or send_pairs(site)
        edges = device_edges(pairs, mode, replicas, partitions) if pairs else None
    else:
        value = site.attributes.get("replica_groups", "{}")
        groups, group_size = device_groups(value, mode, replicas, partitions)
    arrays = payload(context.program, computation, site, group_size)
    size = sum(array.num_bytes for array in arrays)
    parts = parts_of(context, computation, site, op, arrays)
    what = parts[0] if len(parts) == 1 else None
    moves = edges is None or any(source != target for source, target in edges)
    gathers = op == "all_reduce" and bool(parts) and all(part.gathers for part in parts)
    place = context.repeated.get((computation, site.name))
    in_pieces = opcode in ("send", "recv") or chain_id(site) is not None
    return Record(
        op,
        "+".join(dict.fromkeys(dtype_name(array.dtype) for array in arrays)),
        size,
        wire_bytes(op, size, group_size) if moves else 0,
        group_size=group_size,
        groups=groups,
        edges=edges,
        executions=flow.executions[computation],
        phase=context.phases.of(computation, site, place, by_sum=gathers),
        is_async=(is_start and not is_synchronous(site)) or in_pieces or computation in flow.asynchronous,
        name=display(site.name),
        computation=display(computation),
        source=source_of(site.metadata, context.frames),
        flags=tuple(flags_of(site, opcode, arrays, groups)),
        parts=parts if what is None else (),
        reduction=reduction_of(context.program, site) if op in ("all_reduce", "reduce_scatter") else None,
        root=0 if op == "broadcast" else None,  # the first device of a group has the data
        shape=what.shape if what else None,
        moves=what.moves if what else None,
        detail=(what.detail if what else None)
        or told(op_name_of(context.program, flow, computation, site, context.unsplit)),
        gathers=gathers,
    )


def repeated(context: Context, sites: list[tuple[str, Instruction]]) -> dict[Place, Place]:
    """Gathers of what another gather has gathered as well -> where the result of each is, for those that read it."""
    pieces: dict[object, list[tuple[str, Instruction]]] = defaultdict(list)
    of_source: dict[Place, set[object]] = defaultdict(set)
    for computation, site in sites:
        if site.opcode in ("all-gather", "all-gather-start") and len(site.operands) == 1:
            one = chain_of(context.flow, computation, site) or (computation, site.name)
            pieces[one].append((computation, site))
            of_source[origin(context.program, context.flow, computation, site.operands[0])].add(one)
    again = {one for same in of_source.values() if len(same) > 1 for one in same}
    places = {one: result_of(context, pieces[one]) for one in again}
    return {(computation, site.name): places[one] for one in again for computation, site in pieces[one]}


def result_of(context: Context, pieces: list[tuple[str, Instruction]]) -> Place:
    """Where the result of a collective is: of the copies in a TPU's fusions, the caller of the one that ends it."""
    computation, site = pieces[0]
    for inside, _ in pieces if chain_id(site) is not None else ():
        calls = context.flow.callers[inside]
        root = find(context.program, inside, context.program.index(inside).root)
        if calls and root and ASYNC_DONE in root.attributes.get("custom_call_target", ""):
            return calls[0].caller, calls[0].site.name
    return computation, site.name


def told(op_name: str) -> str | None:
    """An op_name without the name of the jitted function, such as `transpose(jvp())/mul`; cut off where it is long."""
    names = names_of(op_name)
    text = ":".join(dict.fromkeys(OUTER.sub("", name) for name in names))
    return display(text if len(text) <= 120 else f"{text[:117]}...") or None


def parts_of(context: Context, computation: str, site: Instruction, op: str, arrays: list[Leaf]) -> tuple[Part, ...]:
    """The operands with what is known of each: its shape, and which argument of the program it is, or what made it.

    None for an all_to_all of a tuple, which holds the blocks of one array.
    """
    if op == "all_to_all" and len(arrays) > 1:
        return ()
    if op == "all_reduce" and len(arrays) == 1 and len(arrays[0].dims) == 1 and site.operands:
        joined = concatenated(context.program, computation, site.operands[0])
        if joined and sum(array.num_bytes for array, *_ in joined) == arrays[0].num_bytes:
            return tuple(
                Part(dtype_name(array.dtype), array.num_bytes, shape, detail=told(op_name))
                for array, shape, op_name in joined
            )
    parts = [Part(dtype_name(array.dtype), array.num_bytes, array.dims) for array in arrays]
    for i, operand in enumerate(site.operands if len(site.operands) == len(parts) else ()):
        argument = argument_of(context.program, context.flow, computation, operand) if op == "all_gather" else None
        if argument is not None:
            parts[i] = replace(parts[i], moves="parameter", detail=argument or None)
        elif len(parts) > 1 and (computed := find(context.program, computation, operand)):
            parts[i] = replace(parts[i], detail=told(computed.op_name))
        if op == "all_reduce" and is_slice_in_zeros(context.program, computation, operand):
            parts[i] = replace(parts[i], gathers=True)
    return tuple(parts)


def group_mode(site: Instruction, opcode: str) -> str:
    """What the ids of a collective's groups mean, by XLA's rules."""
    mode = site.attributes.get("mode")
    if mode in MODES:
        return mode
    if site.attributes.get("use_global_device_ids") == "true":
        return "flattened_id"
    if "channel_id" not in site.attributes:
        return "cross_replica"
    return "cross_replica_and_partition" if opcode in GLOBAL_IDS else "cross_partition"


def payload(program: Program, computation: str, site: Instruction, group_size: int | None) -> list[Leaf]:
    """The arrays whose bytes are the payload: what comes out, but for a reduce_scatter what goes in."""
    opcode = site.opcode.removesuffix("-start")
    is_start = site.opcode != opcode
    shapes = leaves(site.shape)
    is_tuple = site.shape.startswith("(")
    if opcode == "ragged-all-to-all" and site.operands:  # both what goes in and what comes out bound what is sent
        source = find(program, computation, site.operands[0])
        if source and not source.shape.startswith("("):
            sides = [[leaf for _, leaf in leaves(shape)] for shape in (source.shape, site.shape)]
            return min((side for side in sides if side), key=lambda side: sum(leaf.num_bytes for leaf in side))
    if is_tuple and opcode in ("send", "recv"):  # (buffer, context, token)
        return [leaf for index, leaf in shapes if index == 0]
    # ((what goes in), what comes out, contexts...); of an all-reduce in this form only since XLA's of jax 0.11
    if is_tuple and is_start and (opcode != "all-reduce" or site.shape.startswith("((")):
        return [leaf for index, leaf in shapes if index == (0 if opcode == "reduce-scatter" else 1)]
    arrays = [leaf for _, leaf in shapes]
    if opcode == "reduce-scatter" and not is_start and group_size:
        return [replace(leaf, dims=scattered(site, leaf.dims, group_size)) for leaf in arrays]
    if slices := id_lists(site.attributes.get("slice_sizes", "{}")):  # a permute of parts of its buffer, in place
        return [replace(arrays[0], dims=sizes) for sizes in slices] if arrays else []
    return arrays


def scattered(site: Instruction, dims: tuple[int, ...], group_size: int) -> tuple[int, ...]:
    """The dims of what goes into a reduce-scatter, by those of what comes out."""
    dim = site.attributes.get("dimensions", "").strip("{} ")
    i = int(dim) if dim.isdecimal() and int(dim) < len(dims) else 0
    return (*dims[:i], (dims[i] if dims else 1) * group_size, *dims[i + 1 :])


def flags_of(site: Instruction, opcode: str, arrays: list[Leaf], groups: Groups | None) -> Iterator[str]:
    """See the module docstring."""
    if "_promoted" in site.attributes.get("to_apply", ""):
        yield "promoted"
    if opcode.startswith("ragged"):
        yield "ragged"
    if any(array.is_dynamic for array in arrays):
        yield "dynamic"
    if groups and len({len(group) for group in groups}) > 1:
        yield "uneven_groups"
    if opcode == "all-gather" and len(set(site.operands)) < len(site.operands):
        yield "gathered_twice"


def channel(site: Instruction) -> str | None:
    """The channel that a send shares with its receive. (Other collectives may share one without being related.)"""
    return site.attributes.get("channel_id")


def chain_id(site: Instruction) -> str | None:
    """What the copies of one collective in a TPU's async-collective fusions have in common."""
    return site.frontend_attributes.get("chain_id")


def chain_of(flow: Flow, computation: str, site: Instruction) -> tuple[object, ...] | None:
    """The same for all copies of one collective in the fusions of one computation; None for any other collective."""
    chain = chain_id(site)
    return None if chain is None else (outside_of_fusions(flow, computation), site.opcode, channel(site), chain)


def is_host_transfer(site: Instruction) -> bool:
    """Whether a send or receive is between a device and its host."""
    to_host = site.attributes.get("is_host_transfer") == "true"
    return to_host or any(name.startswith("_xla_host_transfer") for name in site.frontend_attributes)


def send_pairs(site: Instruction) -> str | None:
    """source_target_pairs of a send or receive, which has them among the frontend attributes."""
    return site.frontend_attributes.get(PAIRS)


def outside_of_fusions(flow: Flow, computation: str) -> str:
    """The computation that a fusion's computation is part of; itself if it is no fusion's."""
    for _ in range(MAX_CALLERS):
        calls = flow.callers[computation]
        if not calls or calls[0].site.opcode != "fusion":
            break
        computation = calls[0].caller
    return computation


def is_scatter_fusion(flow: Flow, computation: str) -> bool:
    """Whether this is the inside of a TPU's all-reduce-scatter fusion."""
    calls = flow.callers[computation]
    return "all-reduce-scatter" in computation and any(call.site.attributes.get("kind") == "kCustom" for call in calls)
