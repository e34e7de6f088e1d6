"""HLO text, split into what it says: module header, computations, instructions, shapes. No opcode has a meaning here.

Text from XLA's printer has one instruction, computation header or closing brace per line, and one regular expression
takes such a line whole, strings and comments included. Anything else that XLA's parser reads (attributes that continue
on the next line, comments, one-line computations) goes through a token loop, one statement at a time. Both ways are
linear in the text and neither recurses. The grammar is that of xla/hlo/parser (hlo_lexer.cc, hlo_parser.cc).

Text is held as latin-1, one byte per character whatever the file holds; `display` turns a piece of it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple


class HloError(ValueError):
    """The text cannot be read. The message is one line that says where, what is wrong, and what would be right."""


NAME = r"[\w.\-]+"
STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
COMMENT = r"//[^\n]*|/\*.*?\*/"
# The rest of a line: strings (which may hold newlines) are taken whole; a comment other than /*index=5*/ ends the match.
REST = rf'[^"\n/]*(?:(?:{STRING}|/(?![/*])|/\*index=\d+\*/)[^"\n/]*)*'
TUPLE = r'\((?:[^)"\n/]*(?:/\*index=\d+\*/[^)"\n/]*)*\))+?'  # up to the parenthesis that an opcode follows

LINE = re.compile(
    rf"""[ \t]*(?:
      (?:ROOT[ ])?%?({NAME})[ ]=[ ](?:[^\s("]\S*|{TUPLE})[ ]([a-z][a-z0-9\-]*)\({REST}(?<![,({{=\s])(?<![\s)]\}})
    | ()\}}(?:,[ ][\w\-]+=(?:{STRING}|[\w.]+))*            # above, an instruction; here, a computation ends
    | ((?:ENTRY[ ])?)%?({NAME})[ ](?:\({REST}|\{{)(?<=\{{)  # a computation begins
    |                                                      # blank
    )(?:\n|\Z)""",
    re.X | re.S,
)
SPACE = re.compile(rf"(?:\s+|{COMMENT})*", re.S)
LOOSE_INSTRUCTION = re.compile(rf"(?:ROOT\s+)?%?({NAME})\s*=(?!=)")
LOOSE_COMPUTATION = re.compile(rf"(ENTRY\s+)?%?({NAME})(?=[\s(/{{])")
OPCODE = re.compile(r"[a-z][a-z0-9\-]*")
ATTRIBUTE = re.compile(r"([\w\-]+)=")
WORD = re.compile(r'[^\s,"()\[\]{}/]+|/(?![/*])')
BRACKETS = re.compile(rf'[^"()\[\]{{}}/]+|{STRING}|{COMMENT}|[()\[\]{{}}]|/', re.S)
GROUP = "(?!)"  # a bracket group, here up to six deep; `balanced` takes deeper ones
for _ in range(6):
    GROUP = rf'[(\[{{][^"()\[\]{{}}/]*(?:(?:{STRING}|/(?![/*])|/\*index=\d+\*/|{GROUP})[^"()\[\]{{}}/]*)*[)\]}}]'
GROUP_AT = re.compile(GROUP, re.S)
PIECE = re.compile(rf'[^"()\[\]{{}},]*(?:(?:{STRING}|{GROUP})[^"()\[\]{{}},]*)*', re.S)
STRIP = re.compile(rf"({STRING})|{COMMENT}", re.S)
INSTRUCTION = re.compile(
    rf'\s*(ROOT\s)?\s*%?({NAME})\s*=\s*([^\s(]\S*|\((?:[^)"]*\))+?)\s*([a-z][a-z0-9\-]*)\s*\(', re.S
)
OP_NAME = re.compile(rf'\bmetadata=\{{(?:[^"}}]|{STRING})*?\bop_name=({STRING})', re.S)  # strings escape their quotes
ROOT = re.compile(r"\s*ROOT\s")
LAYOUT = re.compile(r"\{[\d:}]")
END_OF_LINE = re.compile(r"[ \t]*(?:\n|\Z)")
DEVICE_IDS = re.compile(r",\s*device_ids=")
PARTIAL = re.compile(r"[%\w.\- ]*\Z")
NAME_AT = re.compile(NAME)
STRING_AT = re.compile(STRING, re.S)
DIM = re.compile(r"(?:<=)?\d{1,18}|\?|<=\?")
LEAF = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?|[()]")
TABLE = re.compile(
    rf"\s*(FileNames|FunctionNames|FileLocations|StackFrames)\b((?:\s+\d+\s+(?:{STRING}|\{{[^}}]*\}}))*)", re.S
)
FIELD = re.compile(rf"([\w\-.]+)\s*=\s*({STRING}|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^\s,}}]+)", re.S)

BEGIN, END = "{", "}"  # what stands for the opcode where a computation begins and ends


class Statement(NamedTuple):
    """Where an instruction stands, or a computation begins or ends (opcode BEGIN, END). start, end: offsets."""

    opcode: str
    name: str
    start: int
    end: int
    is_entry: bool = False


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
    """One instruction: `name = shape opcode(argument)rest`, all still text. What the rest holds is read when asked for."""

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
        return dict(attributes(self.rest))

    @cached_property
    def metadata(self) -> dict[str, str]:
        """Fields of `metadata={...}`, strings without their quotes."""
        return fields(self.attributes.get("metadata", ""))

    @cached_property
    def op_name(self) -> str:
        """The op_name of the metadata, "" without one."""
        found = OP_NAME.search(self.rest)
        return found[1][1:-1] if found else ""


@dataclass
class Computation:
    """A computation's name and the span of its instructions, with what was looked up in it so far."""

    name: str
    start: int
    end: int = 0
    is_entry: bool = False
    line_of: dict[str, int] = field(default_factory=dict)
    root: str = ""


@dataclass(frozen=True)
class Program:
    """A module: text (latin-1), name, header fields, stack-frame tables, computations, statements of interest."""

    text: str
    name: str
    header: dict[str, str]
    tables: dict[str, str]
    computations: dict[str, Computation]
    entry: str
    interesting: list[tuple[str, Statement]]

    def index(self, computation: str) -> Computation:
        """The computation, with `line_of` (offset by instruction name) and `root` filled in."""
        found = self.computations[computation]
        if not found.line_of:
            for statement in statements(self.text, found.start, found.end, None):
                found.line_of[statement.name] = statement.start
                if ROOT.match(self.text, statement.start):
                    found.root = statement.name
            if not found.root and found.line_of:  # without a ROOT, the last instruction is it
                found.root = next(reversed(found.line_of))
        return found

    def instruction(self, computation: str, name: str) -> Instruction | None:
        """The instruction of that name, or None."""
        found = self.index(computation)
        start = found.line_of.get(name)
        if start is None:
            return None
        return instruction(self.text, next(statements(self.text, start, found.end, None)))


def display(text: str) -> str:
    """A piece of latin-1 program text as the file's author wrote it."""
    return text if text.isascii() else text.encode("latin-1", "replace").decode("utf-8", "replace")


def error(text: str, position: int, problem: str) -> HloError:
    """An HloError that names the line."""
    return HloError(f"line {text.count(chr(10), 0, position) + 1}: {problem}")


def cut_off(where: str) -> HloError:
    """An HloError for text that ends too early."""
    return HloError(f"cut off inside {where}: HLO text ends with the closing brace of its last computation")


def parse(text: str, opcodes: frozenset[str]) -> Program:
    """Split a module, remembering the statements with one of `opcodes`. Raises HloError on anything but one module."""
    position = skip(text, 0)
    if not text.startswith("HloModule", position):
        raise HloError("not HLO text: it starts with " + repr(display(text[position : position + 24])))
    position = skip(text, position + len("HloModule"))
    named = NAME_AT.match(text, position)
    if not named:
        raise cut_off("the HloModule line") if position >= len(text) else error(text, position, "HloModule has no name")
    position = attributes_end(text, named.end())
    header = dict(attributes(clean(text[named.end() : position])))
    tables = {}
    while table := TABLE.match(text, position):
        tables[table[1]] = table[2]
        position = table.end()

    computations: dict[str, Computation] = {}
    interesting = []
    current = None
    for statement in statements(text, position, len(text), opcodes):
        if statement.opcode == BEGIN:
            if current is not None:
                raise error(text, statement.start, f"computation {statement.name} begins inside {current.name}")
            current = Computation(statement.name, statement.end, is_entry=statement.is_entry)
        elif statement.opcode == END:
            if current is None:
                raise error(text, statement.start, "a closing brace without a computation")
            if current.name in computations:
                raise error(text, current.start, f"computation {display(current.name)} is defined twice")
            current.end = statement.start
            computations[current.name] = current
            current = None
        else:
            if current is None:
                raise error(text, statement.start, f"instruction {display(statement.name)} outside of any computation")
            interesting.append((current.name, statement))
    if current is not None:
        raise cut_off(f"computation {display(current.name)}")
    if not computations:
        raise cut_off("the module, before any computation")
    entries = [c.name for c in computations.values() if c.is_entry]
    if not entries and "entry_computation_layout" in header:  # XLA's printer writes both or neither
        raise cut_off("the module, before the ENTRY computation")
    if len(entries) > 1:
        raise HloError(f"{len(entries)} ENTRY computations: a module has one")
    entry = entries[0] if entries else next(reversed(computations))  # so XLA's parser has it
    return Program(text, named[0], header, tables, computations, entry, interesting)


def statements(text: str, start: int, stop: int, opcodes: frozenset[str] | None) -> Iterator[Statement]:
    """What text[start:stop] holds, in order; of the instructions only those with one of `opcodes` (None: all).

    Raises HloError where the text is no HLO or breaks off.
    """
    match = LINE.match
    is_line_start = start == 0 or text[start - 1] == "\n"
    while start < stop:
        line = match(text, start) if is_line_start else None
        opcode = line and line[2]
        # A second " = " is a second instruction on this line, or stands in a string: the token loop can tell.
        if line is None or (opcode and text.find(" = ", line.end(2), line.end()) >= 0):
            position = skip(text, start)
            if position >= stop:
                return
            statement = loose_statement(text, position)
            if opcodes is None or statement.opcode in opcodes or statement.opcode in (BEGIN, END):
                yield statement
            follow = END_OF_LINE.match(text, statement.end)
            start, is_line_start = (follow.end(), True) if follow else (statement.end, False)
            continue
        if opcode:
            if opcodes is None or opcode in opcodes:
                yield Statement(opcode, line[1], start, line.end())
        elif line[5]:
            yield Statement(BEGIN, line[5], start, line.end(), bool(line[4]))
        elif line[3] is not None:
            yield Statement(END, "", start, line.end())
        start = line.end()


def loose_statement(text: str, start: int) -> Statement:
    """The statement at `start`, however it is laid out."""
    if text[start] == "}":
        return Statement(END, "", start, attributes_end(text, start + 1))
    if found := LOOSE_INSTRUCTION.match(text, start):
        position = skip(text, found.end())
        if text.startswith("(", position):
            position = balanced(text, position)
        else:
            position = value_end(text, position)
        position = skip(text, position)
        opcode = OPCODE.match(text, position)
        opening = skip(text, opcode.end()) if opcode else position
        if opcode and text.startswith("(", opening):
            return Statement(opcode[0], found[1], start, attributes_end(text, balanced(text, opening)))
        if opening >= len(text):
            raise cut_off(f"instruction {display(found[1])}")
        raise error(text, start, f"instruction {display(found[1])} has no opcode")
    if found := LOOSE_COMPUTATION.match(text, start):
        position = skip(text, found.end())
        while position < len(text):
            if text[position] == "{" and (text[position - 1] != "]" or not LAYOUT.match(text, position)):
                return Statement(BEGIN, found[2], start, position + 1, bool(found[1]))
            if text[position] in "([{":
                position = skip(text, balanced(text, position))
            elif word := WORD.match(text, position):
                if "=" in word[0]:
                    break
                position = skip(text, word.end())
            else:
                break
        else:
            raise cut_off(f"the header of computation {display(found[2])}")
    if PARTIAL.match(text, start):
        raise cut_off("a statement")
    if text.startswith("HloModule", start):
        raise error(text, start, "a second module begins: one module per file")
    raise error(text, start, f"not HLO: {display(text[start : start + 24].split(chr(10))[0])!r}")


def skip(text: str, position: int) -> int:
    """The offset after whitespace and comments. Raises HloError at a comment without an end."""
    position = SPACE.match(text, position).end()  # type: ignore[union-attr]
    if text.startswith("/*", position):
        raise cut_off("a comment")
    return position


def balanced(text: str, start: int) -> int:
    """The offset after the bracket group that opens at `start`."""
    if shallow := GROUP_AT.match(text, start):
        return shallow.end()
    depth = 0
    position = start
    while token := BRACKETS.match(text, position):
        position = token.end()
        if token[0] in ("(", "[", "{"):
            depth += 1
        elif token[0] in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return position
        elif token[0] == "/" and text.startswith("*", position):
            break
    raise cut_off("brackets" if position >= len(text) else "a string or a comment")


def value_end(text: str, position: int) -> int:
    """The offset after a value: words, strings and bracket groups without space between them."""
    while position < len(text):
        if text[position] in "([{":
            position = balanced(text, position)
        elif text[position] == '"':
            string = STRING_AT.match(text, position)
            if not string:
                raise cut_off("a string")
            position = string.end()
        elif word := WORD.match(text, position):
            position = word.end()
        else:
            break
    return position


def attributes_end(text: str, position: int) -> int:
    """The offset after `, name=value, name=value...`, which may be nothing at all."""
    while text.startswith(",", comma := skip(text, position)):
        start = skip(text, comma + 1)
        attribute = ATTRIBUTE.match(text, start)
        if not attribute:
            raise cut_off("attributes") if start >= len(text) else error(text, start, "an attribute name is missing")
        start = skip(text, attribute.end())
        position = value_end(text, start)
        if position == start:
            raise cut_off("attributes") if start >= len(text) else error(text, start, f"{attribute[1]}= has no value")
        if text.startswith("mesh", start):  # mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}
            follow = skip(text, position)
            if DEVICE_IDS.match(text, follow):
                position = value_end(text, skip(text, text.index("=", follow) + 1))
                follow = skip(text, position)
            if text.startswith("{", follow):
                position = balanced(text, follow)
    return position


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


def attributes(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of `, name=value, ...`, clean text. A mesh keeps its device_ids."""
    name, value = "", ""
    for piece in split(text):
        key, _, rest = piece.partition("=")
        if key == "device_ids" and value.startswith("mesh"):
            value += ", " + piece
            continue
        if name:
            yield name, value
        name, value = key.strip(), rest.strip()
    if name:
        yield name, value


def instruction(text: str, statement: Statement) -> Instruction:
    """A statement's parts. Raises HloError if they do not fit together."""
    line = clean(text[statement.start : statement.end])
    found = INSTRUCTION.match(line)
    if not found:
        raise error(text, statement.start, f"instruction {display(statement.name)} cannot be read")
    close = balanced(line, found.end() - 1)
    return Instruction(found[2], found[3], found[4], line[found.end() : close - 1], line[close:])


def fields(text: str) -> dict[str, str]:
    """name=value pairs of an attribute such as `metadata={...}`, strings without quotes and escapes."""
    found = {}
    for pair in FIELD.finditer(text.strip()[1:-1]):
        value = pair[2]
        found.setdefault(pair[1], re.sub(r"\\(.)", r"\1", value[1:-1]) if value[0] == '"' else value)
    return found


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
        elif leaf := array(token[1], token[2], token[3] or ""):
            found.append((index, leaf))
        index += depth == 1
    return found


def array(dtype: str, dims: str, layout: str) -> Leaf | None:
    """The shape of an array, None for a token. `E(4)` in a layout is the size of an element in bits."""
    if dtype in ("token", "opaque"):
        return None
    width = re.search(r"\d{1,3}", dtype)  # the first number in a type's name is its size: bf16, c64, f8e4m3fn, s4
    bits = 8 if dtype == "pred" else int(width[0]) if width else 0
    if packed := re.search(r"E\((\d{1,3})\)", layout):
        bits = int(packed[1])
    if not bits:
        raise HloError(f"element type {display(dtype)!r} is unknown")
    sizes = [dim.strip() for dim in dims.split(",") if dim.strip()]
    if not all(DIM.fullmatch(size) for size in sizes):
        raise HloError(f"shape {display(dtype)}[{display(dims)}] cannot be read")
    is_dynamic = any(size[0] in "<?" for size in sizes)
    leaf = Leaf(dtype, tuple(int(size.lstrip("<=").replace("?", "1")) for size in sizes), bits, is_dynamic)
    if leaf.num_bytes >= 2**63:
        raise HloError(f"shape {display(dtype)}[{display(dims)}] is larger than any memory")
    return leaf
