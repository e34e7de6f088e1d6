"""HLO text, split into the module's header, its tables, its computations and their instructions.

Text from XLA's printer has one instruction, computation header or closing brace per line, and one regular expression
takes such a line whole, strings and comments included, if nothing else is on it. What else XLA's parser reads
(attributes that continue on the next line, comments, one-line computations) goes through a token loop, one statement at
a time. Both ways are linear in the text and neither recurses. The grammar is that of xla/hlo/parser (hlo_lexer.cc,
hlo_parser.cc).

Text is held as latin-1, one byte per character whatever the file holds; `display` turns a piece of it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardiff.hlo.errors import HloError, cut_off, error, shown

NAME = r"[\w.\-]+"
STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
COMMENT = r"//[^\n]*|/\*.*?\*/"
GROUP = "(?!)"  # a bracket group, here up to six deep; `balanced` takes deeper ones
for _ in range(6):
    GROUP = rf'[(\[{{][^"()\[\]{{}}/]*+(?:(?:{STRING}|/(?![/*])|/\*index=\d+\*/|{GROUP})[^"()\[\]{{}}/]*+)*+[)\]}}]'
SHAPE = rf'(?:[^\s("]\S*|(?=\(){GROUP})'
VALUE = rf'(?:[^\s,"()\[\]{{}}/]|{STRING}|{GROUP}|/(?![/*]))++'

LINE = re.compile(
    rf"""[ \t]*(?:
      (?:ROOT[ ])?%?({NAME})[ ]=[ ]{SHAPE}[ ]([a-z][a-z0-9\-]*)(?=\(){GROUP}(?:,[ ][\w\-]+={VALUE})*+
    | ()\}}(?:,[ ][\w\-]+=(?:{STRING}|[\w.]+))*     # above, an instruction; here, a computation ends
    | ((?:ENTRY[ ])?)%?({NAME})[ ](?:(?=\(){GROUP}[ ]->[ ]{SHAPE}[ ])?\{{  # a computation begins
    |                                               # blank
    )(?:\n(?!\s*,)|\Z)""",
    re.X | re.S,
)
SPACE = re.compile(rf"(?:\s+|{COMMENT})*", re.S)
KEYWORD = re.compile(rf"(?:ROOT|ENTRY)(?!{NAME})")
NAMED = re.compile(rf"%?({NAME})")
OPCODE = re.compile(r"[a-z][a-z0-9\-]*")
ATTRIBUTE = re.compile(r"([\w\-]+)=")
WORD = re.compile(r'[^\s,"()\[\]{}/]+|/(?![/*])')
BRACKETS = re.compile(rf'[^"()\[\]{{}}/]+|{STRING}|{COMMENT}|[()\[\]{{}}]|/', re.S)
GROUP_AT = re.compile(GROUP, re.S)
ROOT = re.compile(rf"\s*ROOT(?!{NAME})")
LAYOUT = re.compile(r"\{[\d:}]")
DEVICE_IDS = re.compile(r",\s*device_ids=")
MODULE_NAME = re.compile(r"[^\s,]+")
STRING_AT = re.compile(STRING, re.S)
TABLE = re.compile(
    rf"\s*(FileNames|FunctionNames|FileLocations|StackFrames)\b((?:\s+\d+\s+(?:{STRING}|\{{[^}}]*\}}))*)", re.S
)

BEGIN, END = "{", "}"  # what stands for the opcode where a computation begins and ends


class Statement(NamedTuple):
    """Where an instruction stands, or a computation begins or ends (opcode BEGIN, END). start, end: offsets."""

    opcode: str
    name: str
    start: int
    end: int
    is_entry: bool = False


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
    """A module: text (latin-1), name, header attributes, stack-frame tables, computations, statements of interest."""

    text: str
    name: str
    header: str
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


def parse(text: str, opcodes: frozenset[str]) -> Program:
    """Split a module, remembering the statements with one of `opcodes`. Raises HloError on anything but one module."""
    position = skip(text, 0)
    if not text.startswith("HloModule", position):
        raise HloError("not HLO text: it starts with " + repr(shown(text[position : position + 24])))
    position = skip(text, position + len("HloModule"))
    named = MODULE_NAME.match(text, position)
    if not named:
        raise cut_off("the HloModule line") if position >= len(text) else error(text, position, "HloModule has no name")
    position = attributes_end(text, named.end())
    header = text[named.end() : position]
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
                inside = f"computation {shown(statement.name)} begins inside {shown(current.name)}"
                raise error(text, statement.start, inside)
            current = Computation(statement.name, statement.end, is_entry=statement.is_entry)
        elif statement.opcode == END:
            if current is None:
                raise error(text, statement.start, "a closing brace without a computation")
            if current.name in computations:
                raise error(text, current.start, f"computation {shown(current.name)} is defined twice")
            current.end = statement.start
            computations[current.name] = current
            current = None
        else:
            if current is None:
                raise error(text, statement.start, f"instruction {shown(statement.name)} outside of any computation")
            interesting.append((current.name, statement))
    if current is not None:
        raise cut_off(f"computation {shown(current.name)}")
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
    while start < stop:
        line = LINE.match(text, start)
        if line is None:
            position = skip(text, start)
            if position >= stop:
                return
            statement = loose_statement(text, position)
            if opcodes is None or statement.opcode in opcodes or statement.opcode in (BEGIN, END):
                yield statement
            start = statement.end
            continue
        if opcode := line[2]:
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
    keyword = KEYWORD.match(text, start)
    named = NAMED.match(text, skip(text, keyword.end()) if keyword else start)
    if named and named[1] == "HloModule":
        raise error(text, start, "a second module begins: one module per file")
    if named:
        position = skip(text, named.end())
        if text.startswith("=", position):
            opcode, end = loose_instruction(text, named[1], skip(text, position + 1))
            return Statement(opcode, named[1], start, end)
        if end := loose_header(text, named[1], position):
            return Statement(BEGIN, named[1], start, end, keyword is not None)
    raise error(text, start, f"not HLO: {shown(text[start : start + 24].split(chr(10))[0])!r}")


def loose_instruction(text: str, name: str, position: int) -> tuple[str, int]:
    """(opcode, offset of the end) of the instruction whose shape stands at `position`."""
    end = balanced(text, position) if text.startswith("(", position) else value_end(text, position)
    found = OPCODE.match(text, skip(text, end))
    opening = skip(text, found.end() if found else end)
    if found and text.startswith("(", opening):
        return found[0], attributes_end(text, balanced(text, opening))
    if opening >= len(text):
        raise cut_off(f"instruction {shown(name)}")
    raise error(text, opening, f"instruction {shown(name)} has no opcode")


def loose_header(text: str, name: str, position: int) -> int | None:
    """The offset after the brace that opens a computation, None if this is no computation's header."""
    while position < len(text):
        if text[position] == "{" and (text[position - 1] != "]" or not LAYOUT.match(text, position)):
            return position + 1
        word = WORD.match(text, position)
        if text[position] in "([{":
            position = skip(text, balanced(text, position))
        elif word and "=" not in word[0]:
            position = skip(text, word.end())
        else:
            return None
    raise cut_off(f"the header of computation {shown(name)}")


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
            raise (
                cut_off("attributes")
                if start >= len(text)
                else error(text, start, f"{shown(attribute[1])}= has no value")
            )
        if text.startswith("mesh", start):  # mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}
            follow = skip(text, position)
            if DEVICE_IDS.match(text, follow):
                position = value_end(text, skip(text, text.index("=", follow) + 1))
                follow = skip(text, position)
            if text.startswith("{", follow):
                position = balanced(text, follow)
    return position
