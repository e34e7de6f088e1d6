"""What an XLA program communicates: HLO text -> list[Record]. For CPU, GPU and TPU, optimized or not.

    jax.jit(f).lower(*args).compile().as_text()                    the text, and so are the files of
    XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"           which are in DIR/*after_optimizations.txt

One record per collective instruction that ENTRY reaches; loops, calls and branches are in `executions`. What is printed
in pieces is put together: a start and its done; the copies of one collective in a TPU's async-collective fusions; a
send and its receive, which are one collective_permute. The all-reduce in a TPU's all-reduce-scatter fusion is a
reduce_scatter. Bytes are those of the shapes; for a permute, group_size is None.

The reader fills in what the text hides: the reduction, which is a computation of its own; the parts of a GPU's
combined all-reduce, whose one operand is their concatenation; which argument of the program a gather's operand is.

Flags: "promoted" (the reduction runs in a wider type than the program's), "ragged" and "dynamic" (bytes are an upper
bound), "uneven_groups" (group_size is the largest), "gathered_twice" (a combined all_gather has an operand twice).
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from shardiff.hlo.errors import HloError, display, shown
from shardiff.hlo.flow import follow_calls
from shardiff.hlo.instruction import attributes, clean, stack_frames
from shardiff.hlo.phases import Phases
from shardiff.hlo.records import CALLS, COLLECTIVES, Context, collectives
from shardiff.hlo.text import parse
from shardiff.record import Record

__all__ = ["HloError", "Module", "read", "read_bytes", "read_file"]

HOW = "compile with jax.jit(f).lower(...).compile().as_text(), or lower with .as_text(dialect='hlo')"
MLIR = re.compile(r"\s*(?:#\w+\s*=|module\b|\"builtin\.module\"|func\.func\b|#loc)")


@dataclass(frozen=True)
class Module:
    """The module's name, how many devices it runs on, and a record for each collective, in the order of the text."""

    name: str
    num_devices: int
    records: list[Record]


def read_file(path: str | Path) -> Module:
    """Read a file of HLO text, gzipped or not. Raises HloError, one line that starts with the file's name."""
    return _read(decode(load(path), str(path)), str(path))


def read_bytes(data: bytes, name: str, most: int | None = None) -> Module:
    """Read HLO text, gzipped or not; `name` stands for it in errors. most: bytes of text. Raises HloError."""
    return _read(decode(data, name, most), name)


def read(text: str, name: str = "<text>") -> Module:
    """Read HLO text. Raises HloError, one line that starts with `name`."""
    return _read(text.removeprefix("\ufeff").encode("utf-8", "surrogatepass").decode("latin-1"), name)


def load(path: str | Path) -> bytes:
    """A file's content. Raises HloError."""
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise HloError(f"{path}: no such file") from None
    except (OSError, ValueError) as problem:
        raise HloError(f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def decode(data: bytes, name: str, most: int | None = None) -> str:
    """Text with one character per byte (see shardiff.hlo.text), whatever the encoding.

    most: bytes that a gzip file may hold. Raises HloError.
    """
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(io.BytesIO(data)) as file:
                data = file.read(-1 if most is None else most + 1)
        except (OSError, EOFError, zlib.error):
            raise HloError(f"{name}: the gzip file is cut off or damaged") from None
        if most is not None and len(data) > most:
            raise HloError(f"{name}: the gzip file holds more than {most:,} bytes, which is what memory is there for")
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
    if text.startswith("ML\xefR") or MLIR.match(text):
        raise HloError(f"StableHLO (MLIR), not HLO: {HOW}")
    if "\0" in text:
        raise HloError(f"binary, not HLO text: for text, dump with --xla_dump_hlo_as_text or {HOW}")
    program = parse(text.replace("\r\n", "\n"), COLLECTIVES | CALLS)

    calls = [site for site in program.interesting if site[1].opcode in CALLS]
    found = [site for site in program.interesting if site[1].opcode not in CALLS]
    flow = follow_calls(program, calls, {computation for computation, _ in found})
    header = attributes(clean(program.header))
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
        raise HloError(f"{shown(value)!r} is no number of devices")
    return int(value)
