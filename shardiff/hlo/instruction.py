"""One HLO instruction taken apart: operands, attributes, metadata, shapes, source line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from shardiff.hlo.errors import HloError, display, error, shown
from shardiff.hlo.text import COMMENT, GROUP, NAME, STRING, Program, Statement, balanced, statements
from shardiff.record import BITS

PIECE = re.compile(rf'[^"()\[\]{{}},]*(?:(?:{STRING}|{GROUP})[^"()\[\]{{}},]*)*', re.S)
STRIP = re.compile(rf"({STRING})|{COMMENT}", re.S)
INSTRUCTION = re.compile(
    rf'\s*(?:ROOT\s)?\s*%?({NAME})\s*=\s*([^\s(]\S*(?=\s)|\((?:[^)"]*\))+?)\s*([a-z][a-z0-9\-]*)\s*(\()', re.S
)
# Within a string the quotes are escaped, so that none in there can look like this.
OP_NAME = re.compile(rf'\bmetadata=\{{(?:[^"}}]|{STRING})*?\bop_name=({STRING})', re.S)
FIELD = re.compile(rf"([\w\-.]+)\s*=\s*({STRING}|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^\s,}}]+)", re.S)
ROW = re.compile(rf"(\d+)\s+({STRING}|\{{[^}}]*\}})", re.S)  # of a table
ESCAPE = re.compile(r"\\(?:([0-3][0-7]{2})|(.))", re.S)
LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\]((?:\{[^}]*\})?)|[()]")
DTYPES = {"pred": "bool", "f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}
DIM = re.compile(r"(?:<=)?\d{1,18}|\?|<=\?")


@dataclass(frozen=True)
class Leaf:
    """An array's shape: XLA's element type, dims (upper bounds, where dynamic), bits per element."""

    dtype: str
    dims: tuple[int, ...]
    bits: int
    is_dynamic: bool = False

    @property
    def num_bytes(self) -> int:
        """Logical bytes, without a layout's padding. Elements narrower than a byte are packed."""
        size = self.bits
        for dim in self.dims:
            size *= dim
        return -(-size // 8)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name = shape opcode(argument)rest`, all still text, read further when asked for."""

    name: str
    shape: str
    opcode: str
    argument: str
    rest: str

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands. (A constant or a parameter has none: its argument is a value.)"""
        if self.opcode in ("constant", "parameter"):
            return ()
        return tuple(value.split()[-1].lstrip("%") for value in split(self.argument) if value)

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Values, still text, by name."""
        return attributes(self.rest)

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Fields of `metadata={...}`, strings without their quotes."""
        return fields(self.attributes.get("metadata", ""))

    @cached_property
    def frontend_attributes(self) -> dict[str, str]:
        """Fields of `frontend_attributes={...}`, what compiler passes have noted, strings without their quotes."""
        return fields(self.attributes.get("frontend_attributes", ""))

    @property
    def backend_config(self) -> str:
        """The backend's configuration as JSON text; older text has it as an escaped string."""
        return self.attributes.get("backend_config", "").replace('\\"', '"')

    @cached_property
    def op_name(self) -> str:
        """The op_name of the metadata, "" without one."""
        found = OP_NAME.search(self.rest)
        return found[1][1:-1] if found else ""


def clean(text: str) -> str:
    """The same text with every comment replaced by a space."""
    if "/*" not in text and "//" not in text:
        return text
    return STRIP.sub(lambda found: found[1] or " ", text)


def split(text: str) -> list[str]:
    """The pieces between commas that are outside of brackets and strings, [] for blank text."""
    pieces, start, position = [], 0, 0
    while True:
        position = PIECE.match(text, position).end()  # type: ignore[union-attr]
        if position >= len(text):
            break
        if text[position] == ",":
            pieces.append(text[start:position].strip())
            start = position = position + 1
        elif text[position] in "([{":
            position = balanced(text, position)
        else:
            position += 1  # a closing bracket that nothing opened
    last = text[start:].strip()
    return [*pieces, last] if pieces or last else []


def names(value: str) -> list[str]:
    """The computations that `%f` or `{%f, %g}` names."""
    return [name.lstrip("%") for name in split(value.strip("{}"))]


def attributes(text: str) -> dict[str, str]:
    """The values of `, name=value, ...`, clean text, by name. A mesh keeps its device_ids."""
    found: dict[str, str] = {}
    before = ""
    for piece in split(text):
        name, _, value = piece.partition("=")
        if name == "device_ids" and before and found[before].startswith("mesh"):
            found[before] += ", " + piece
        elif before := name.strip():
            found[before] = value.strip()
    return found


def instruction(text: str, statement: Statement) -> Instruction:
    """A statement's parts. Raises HloError if they do not fit together."""
    line = clean(text[statement.start : statement.end])
    found = INSTRUCTION.match(line)
    if not found or found[3] != statement.opcode:
        raise error(text, statement.start, f"instruction {shown(statement.name)} cannot be read")
    close = balanced(line, found.start(4))
    return Instruction(found[1], found[2], found[3], line[found.end() : close - 1], line[close:])


def find(program: Program, computation: str, name: str) -> Instruction | None:
    """The instruction of that name in a computation, or None."""
    found = program.index(computation)
    start = found.line_of.get(name)
    if start is None:
        return None
    return instruction(program.text, next(statements(program.text, start, found.end, None)))


def fields(text: str) -> dict[str, str]:
    """name=value pairs of an attribute such as `metadata={...}`, strings without quotes and escapes."""
    found = {}
    for pair in FIELD.finditer(text.strip()[1:-1]):
        value = pair[2]
        found.setdefault(pair[1], unescaped(value) if value[0] == '"' else value)
    return found


def unescaped(string: str) -> str:
    """A string without its quotes and escapes; a byte that is no ASCII may be three octal digits."""
    return ESCAPE.sub(lambda found: chr(int(found[1], 8)) if found[1] else found[2], string[1:-1])


def leaves(shape: str) -> list[tuple[int, Leaf]]:
    """The arrays of a shape, each with the index of the outermost tuple's element that it is in (0 without a tuple).

    Tokens and opaque values have no bytes and are left out. Raises HloError on an element type of unknown size.
    """
    found = []
    depth = index = 0
    for token in LEAF.finditer(shape):
        if token[0] == "(":
            depth += 1
            continue
        if token[0] == ")":
            depth -= 1
        elif leaf := array(token[1], token[2], token[3]):
            found.append((index, leaf))
        index += depth == 1
    return found


def array(dtype: str, dims: str, layout: str) -> Leaf | None:
    """The shape of an array, None for a token. `E(4)` in a layout is the size of an element in bits."""
    if dtype in ("token", "opaque"):
        return None
    width = re.search(r"\d{1,3}", dtype)
    bits = BITS.get(dtype_name(dtype)) or (int(width[0]) if width else 0)  # a newer type has its size in its name
    if packed := re.search(r"E\((\d{1,3})\)", layout):
        bits = int(packed[1])
    if not bits:
        raise HloError(f"element type {shown(dtype)!r} is unknown")
    sizes = [dim.strip() for dim in dims.split(",") if dim.strip()]
    if not all(DIM.fullmatch(size) for size in sizes):
        raise HloError(f"shape {shown(dtype)}[{shown(dims)}] cannot be read")
    is_dynamic = any(not size.isdecimal() for size in sizes)
    leaf = Leaf(dtype, tuple(int(size.removeprefix("<=").replace("?", "1")) for size in sizes), bits, is_dynamic)
    if leaf.num_bytes >= 2**63:
        raise HloError(f"shape {shown(dtype)}[{shown(dims)}] is larger than any memory")
    return leaf


def dtype_name(dtype: str) -> str:
    """XLA's element type as NumPy and ml_dtypes call it: f32 -> float32, f8e4m3fn -> float8_e4m3fn, s4 -> int4."""
    found = re.fullmatch(r"([a-z]+)(\d*)(\w*)", dtype)
    if found is None:
        return dtype
    kind, width, variant = found.groups()
    return DTYPES.get(kind, kind) + width + (f"_{variant}" if variant else "")


def stack_frames(tables: dict[str, str]) -> dict[str, str]:
    """The user's line, as `file:line`, by stack_frame_id, from the tables before the first computation.

    It is the innermost one outside of installed packages; where a package made the call, its line follows in brackets,
    as in `train.py:12 (nn/linear.py:431)`. Where all are in packages, the innermost.
    """
    file_names, locations, frames = (
        dict(ROW.findall(tables.get(table, ""))) for table in ("FileNames", "FileLocations", "StackFrames")
    )
    files = {i: unescaped(name) for i, name in file_names.items()}
    places: dict[str, tuple[str, str]] = {}
    for i, location in locations.items():
        place = fields(location)
        places[i] = files.get(place.get("file_name_id", ""), "?"), place.get("line", "?")
    at = {i: fields(frame) for i, frame in frames.items()}
    if any(frame.get("parent_frame_id") == i for i, frame in at.items()):  # XLA prints one more, and 1 for none
        at = {i: frame | {"parent_frame_id": before(frame)} for i, frame in at.items()}
    own: dict[str, str] = {}  # in packages alone -> the frame of the user's that called it, found once
    lines = {}
    for i, frame in at.items():
        place = places.get(frame.get("file_location_id", ""))
        if place is None:
            continue
        lines[i] = ":".join(place)
        if in_package(place[0]) and (caller := users_frame(i, at, places, own)):
            user, name = places[at[caller]["file_location_id"]], place[0].replace("\\", "/").split("/")
            lines[i] = f"{':'.join(user)} ({'/'.join(name[-2:])}:{place[1]})"
    return lines


def before(frame: dict[str, str]) -> str:
    """The number one below that of a frame's parent."""
    parent = frame.get("parent_frame_id", "")
    return str(int(parent) - 1) if parent.isdecimal() else ""


def users_frame(
    frame: str, at: dict[str, dict[str, str]], places: dict[str, tuple[str, str]], known: dict[str, str]
) -> str:
    """The innermost frame outside of installed packages among the callers of one inside; "" where there is none."""
    path: list[str] = []
    found = ""
    while frame in at and frame not in path:
        if frame in known:
            found = known[frame]
            break
        place = places.get(at[frame].get("file_location_id", ""))
        if place and not in_package(place[0]):
            found = frame
            break
        path.append(frame)
        frame = at[frame].get("parent_frame_id", "")
    known.update(dict.fromkeys(path, found))
    return found


def in_package(file: str) -> bool:
    """Whether a file is one of an installed package."""
    return "site-packages" in file or "dist-packages" in file


def source_of(metadata: dict[str, str], frames: dict[str, str]) -> str | None:
    """file:line of the user's code, where the text has it."""
    if "source_file" in metadata:
        return display(f"{metadata['source_file']}:{metadata.get('source_line', '?')}")
    place = frames.get(metadata.get("stack_frame_id", ""))
    return display(place) if place else None
