"""What an XLA program communicates: HLO text -> list[Record]. For CPU, GPU and TPU, optimized or not.

    jax.jit(f).lower(*args).compile().as_text()                    the text, and so are the files of
    XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"           which are in DIR/*after_optimizations.txt

One record per collective instruction that ENTRY reaches; loops, calls and branches are in `executions`. What is printed
in pieces is put together: a start and its done; the copies of one collective in a TPU's async-collective fusions; a
send and its receive, which are one collective_permute. The all-reduce in a TPU's all-reduce-scatter fusion is a
reduce_scatter. Bytes are those of the shapes; for a permute, group_size is None.

Flags: "promoted" (the reduction runs in a wider type than the program's), "ragged" and "dynamic" (bytes are an upper
bound), "uneven_groups" (group_size is the largest).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from contract.communication import Record, wire_bytes

from .hlo_flow import Flow, follow_calls, is_synchronous
from .hlo_groups import Groups, device_edges, device_groups, id_lists
from .hlo_instruction import (
    Instruction,
    Leaf,
    attributes,
    clean,
    fields,
    find,
    instruction,
    leaves,
    source_of,
    stack_frames,
)
from .hlo_phases import MAX_CALLERS, Phases
from .hlo_text import HloError, Program, Statement, display, parse

__all__ = ["HloError", "Module", "read", "read_bytes", "read_file"]

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
DTYPES = {"pred": "bool", "f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
PAIRS = "_xla_send_recv_source_target_pairs"
HOW = "compile with jax.jit(f).lower(...).compile().as_text(), or lower with .as_text(dialect='hlo')"
MLIR = re.compile(r"\s*(?:#\w+\s*=|module\b|\"builtin\.module\"|func\.func\b|#loc)")


@dataclass(frozen=True)
class Module:
    """What was read: the module's name, the devices that it runs on, and its collectives in the order of the text."""

    name: str
    num_devices: int
    collectives: list[Record]


def read_file(path: str | Path) -> Module:
    """Read a file of HLO text, gzipped or not. Raises HloError, one line that starts with the file's name."""
    return _read(decode(load(path), str(path)), str(path))


def read_bytes(data: bytes, name: str) -> Module:
    """Read HLO text, gzipped or not; `name` stands for it in errors. Raises HloError."""
    return _read(decode(data, name), name)


def read(text: str, name: str = "<text>") -> Module:
    """Read HLO text. Raises HloError, one line that starts with `name`."""
    return _read(text if text.isascii() else decode(text.encode("utf-8", "surrogatepass"), name), name)


def load(path: str | Path) -> bytes:
    """A file's content. Raises HloError."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise HloError(f"{path}: no such file") from None
    except (OSError, ValueError) as problem:
        raise HloError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def decode(data: bytes, name: str) -> str:
    """Text with one character per byte (see hlo_text), whatever the encoding. Raises HloError."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise HloError(f"{name}: the gzip file is cut off or damaged") from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what a shell on Windows writes
        data = data.decode("utf-16", "replace").encode("utf-8", "replace")
    return data.removeprefix(b"\xef\xbb\xbf").decode("latin-1")


def _read(text: str, name: str) -> Module:
    try:
        return _module(text)
    except HloError as problem:
        raise HloError(" ".join(f"{name}: {problem}".splitlines())) from None


def _module(text: str) -> Module:
    if not text.strip():
        raise HloError(f"empty: HLO text starts with HloModule; {HOW}")
    if text.startswith("ML\xefR") or (MLIR.match(text) and "HloModule" not in text[:200]):
        raise HloError(f"StableHLO (MLIR), not HLO: {HOW}")
    if "\0" in text:
        raise HloError(f"binary, not HLO text: for text, dump with --xla_dump_hlo_as_text or {HOW}")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    program = parse(text, COLLECTIVES | CALLS)

    calls = [site for site in program.interesting if site[1].opcode in CALLS]
    found = [site for site in program.interesting if site[1].opcode in COLLECTIVES]
    flow = follow_calls(program, calls, {computation for computation, _ in found})
    header = dict(attributes(clean(program.header)))
    replicas, partitions = (count(header.get(key, "1")) for key in ("replica_count", "num_partitions"))
    frames = stack_frames(program.tables)
    context = Context(program, flow, Phases(program, flow), frames, replicas, partitions)
    records = list(collectives(context, found))
    num_devices = replicas * partitions
    for record in records:
        for ranks in record.groups or record.edges or ():
            num_devices = max(num_devices, *(rank + 1 for rank in ranks))
    return Module(display(program.name), num_devices, records)


def count(value: str) -> int:
    """A device count of the module header."""
    if not re.fullmatch(r"\d{1,9}", value) or int(value) == 0:
        raise HloError(f"{display(value[:20])!r} is no number of devices")
    return int(value)


@dataclass(frozen=True)
class Context:
    """What a record needs beside its instruction."""

    program: Program
    flow: Flow
    phases: Phases
    frames: dict[str, str]
    replicas: int
    partitions: int


def collectives(context: Context, found: list[tuple[str, Statement]]) -> Iterator[Record]:
    """The records of the statements in `found`, without those that ENTRY does not reach or that repeat another."""
    program, flow = context.program, context.flow
    sites = [(name, instruction(program.text, where)) for name, where in found if name in flow.executions]
    sent = {channel(site) for _, site in sites if site.opcode == "send"}
    chains = set()
    for computation, site in sites:
        if site.opcode in ("send", "recv") and is_host_transfer(site):
            continue
        if site.opcode == "recv" and channel(site) in sent:
            continue
        if (chain := chain_id(site)) is not None:
            key = (outside_of_fusions(flow, computation), site.opcode, channel(site), chain)
            if key in chains:
                continue
            chains.add(key)
        try:
            yield collective(context, computation, site)
        except HloError as problem:
            raise HloError(f"instruction {display(site.name)}: {problem}") from None


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
    sizes = [array.num_bytes for array in arrays]
    size = sum(sizes)
    moves = edges is None or any(source != target for source, target in edges)
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
        phase=context.phases.of(computation, site),
        is_async=(is_start and not is_synchronous(site)) or in_pieces or flow.is_async[computation],
        name=display(site.name),
        computation=display(computation),
        source=source_of(site.metadata, context.frames),
        flags=tuple(flags_of(site, opcode, arrays, groups)),
        parts=tuple(sizes) if len(sizes) > 1 and op != "all_to_all" else (),
    )


def group_mode(site: Instruction, opcode: str) -> str:
    """What the ids of a collective's groups mean, by XLA's rules."""
    if (mode := site.attributes.get("mode", "")) in MODES:
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
    if opcode == "ragged-all-to-all" and site.operands:  # what goes in bounds what is sent; the output is scratch space
        source = find(program, computation, site.operands[0])
        if source and not source.shape.startswith("("):
            return [leaf for _, leaf in leaves(source.shape)]
    if is_tuple and opcode in ("send", "recv"):  # (buffer, context, token)
        return [leaf for index, leaf in shapes if index == 0]
    if is_tuple and is_start and opcode != "all-reduce":  # (what goes in, what comes out, contexts...)
        return [leaf for index, leaf in shapes if index == (0 if opcode == "reduce-scatter" else 1)]
    arrays = [leaf for _, leaf in shapes]
    if opcode == "reduce-scatter" and not is_start and group_size:
        return [replace(leaf, dims=(*leaf.dims, group_size)) for leaf in arrays]
    if slices := id_lists(site.attributes.get("slice_sizes", "{}")):  # a permute of parts of its buffer, in place
        return [replace(arrays[0], dims=sizes) for sizes in slices] if arrays else []
    return arrays


def dtype_name(dtype: str) -> str:
    """XLA's element type as NumPy and ml_dtypes call it: f32 -> float32, f8e4m3fn -> float8_e4m3fn, s4 -> int4."""
    kind, width, variant = re.fullmatch(r"([a-z]+)(\d*)(\w*)", dtype).groups()  # type: ignore[union-attr]
    return DTYPES.get(kind, kind) + width + (f"_{variant}" if variant else "")


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


def channel(site: Instruction) -> str | None:
    """The channel that a send shares with its receive. (Other collectives may share one without being related.)"""
    return site.attributes.get("channel_id")


def chain_id(site: Instruction) -> str | None:
    """What the copies of one collective in a TPU's async-collective fusions have in common."""
    return fields(site.attributes.get("frontend_attributes", "")).get("chain_id")


def is_host_transfer(site: Instruction) -> bool:
    """Whether a send or receive is between a device and its host."""
    to_host = site.attributes.get("is_host_transfer") == "true"
    return to_host or "_xla_host_transfer" in site.attributes.get("frontend_attributes", "")


def send_pairs(site: Instruction) -> str | None:
    """source_target_pairs of a send or receive, which has them among the frontend attributes."""
    return fields(site.attributes.get("frontend_attributes", "")).get(PAIRS)


def outside_of_fusions(flow: Flow, computation: str) -> str:
    """The computation that a fusion's computation is part of; itself if it is no fusion's."""
    for _ in range(MAX_CALLERS):
        calls = flow.callers.get(computation)
        if not calls or calls[0].site.opcode != "fusion":
            break
        computation = calls[0].caller
    return computation


def is_scatter_fusion(flow: Flow, computation: str) -> bool:
    """Whether this is the inside of a TPU's all-reduce-scatter fusion."""
    calls = flow.callers.get(computation, [])
    return "all-reduce-scatter" in computation and any(call.site.attributes.get("kind") == "kCustom" for call in calls)
