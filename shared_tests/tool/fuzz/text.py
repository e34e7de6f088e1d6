"""Mutations of text."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable

from shared_tests.tool.fuzz.seeds import hlo_seeds

NUMBERS = (b"0", b"-1", b"1", b"7", b"1000000", b"2147483648", b"9223372036854775807", b"9" * 40, b"1" * 5000, b"1e400")
NUMBERS += (b"0x10", b"NaN", b"\xd9\xa3")  # the last one is an Arabic digit in UTF-8
WORDS = (
    *(b"replica_groups=[1000000,1000000]<=[1000000000000]", b"replica_groups=[2,1048576]<=[1048576,2]T(1,0)"),
    *(b"replica_groups={{0,1},{2,3}}", b"replica_groups={}", b"replica_groups={{}}", b"replica_groups={{-1}}"),
    *(b"mesh['x'=1000000000,'y'=1000000000] {'y'}", b"mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a':(1)2}"),
    *(
        b"f32[1000000000,1000000000]{1,0}",
        b"f32[0]",
        b"token[]",
        b"f8e4m3fn[3]",
        b"x99[2]",
        b"s4[7]{0:E(4)}",
        b"opaque[]",
    ),
    *(b'"known_trip_count":{"n":"999999999999999999"}', b'"known_trip_count":{"n":"0"}', b"f32[<=1000,?]"),
    *(b"source_target_pairs={{0,1},{1,0}}", b"source_target_pairs={{0,0}}", b"source_target_pairs={{5}}"),
    *(b"condition=%body", b"body=%cond", b"to_apply=%main", b"calls=%fused", b"branch_computations={%a, %b, %a}"),
    *(
        b"ENTRY",
        b"ROOT",
        b"HloModule",
        b"{",
        b"}",
        b"(",
        b")",
        b"[",
        b"]",
        b'"',
        b"/*",
        b"*/",
        b"//",
        b"\\",
        b'\\"',
        b",",
        b"=",
    ),
    *(
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r\n",
        b"\n\n",
        b"\x1b[31m",
        b"[/]",
        b"[bold]",
        b"[link=x]",
        b"\xc3\xa9",
        b"\x85",
    ),
    *(
        b"all-reduce",
        b"all-gather-start",
        b"all-gather-done",
        b"send",
        b"recv",
        b"while",
        b"conditional",
        b"custom-call",
    ),
)


def span(rng: random.Random, text: bytes, most: int = 400) -> tuple[int, int]:
    """Where a piece begins and ends."""
    start = rng.randrange(len(text) + 1)
    return start, min(len(text), start + int(most ** rng.random()))


def flip(rng: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def delete(rng: random.Random, text: bytes) -> bytes:
    start, end = span(rng, text)
    return text[:start] + text[end:]


def duplicate(rng: random.Random, text: bytes) -> bytes:
    start, end = span(rng, text)
    return text[:end] + text[start:end] * rng.choice((1, 1, 3, 50)) + text[end:]


def swap_lines(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    if len(lines) > 1:
        a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def drop_lines(rng: random.Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True)
    a = rng.randrange(len(lines) + 1)
    return b"".join(lines[:a] + lines[a + rng.choice((1, 1, 1, 5)) :])


def truncate(rng: random.Random, text: bytes) -> bytes:
    return text[: rng.randrange(len(text) + 1)]


def blow_up(rng: random.Random, text: bytes) -> bytes:
    found = list(re.finditer(rb"\d+", text))
    if not found:
        return text
    where = rng.choice(found)
    return text[: where.start()] + rng.choice(NUMBERS) + text[where.end() :]


def blow_up_value(rng: random.Random, text: bytes) -> bytes:
    """Another value for an attribute or a shape."""
    found = list(re.finditer(rb"replica_groups=\S+|source_target_pairs=\S+|\b[a-z]+\d+\[[\d,]*\](?:\{[^}]*\})?", text))
    if not found:
        return insert(rng, text)
    where = rng.choice(found)
    word = rng.choice([w for w in WORDS if b"[" in w or b"{" in w])
    return text[: where.start()] + word + text[where.end() :]


def insert(rng: random.Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(WORDS) + text[at:]


def nest(rng: random.Random, text: bytes) -> bytes:
    at, depth = rng.randrange(len(text) + 1), rng.choice((3, 30, 900, 1100, 30_000))
    opening, closing = rng.choice(
        ((b"(", b")"), (b"{", b"}"), (b"[", b"]"), (b"(f32[2]", b")"), (b"/*", b"*/"), (b'"', b""))
    )
    return text[:at] + opening * depth + rng.choice((b"", closing * depth, closing * (depth - 1))) + text[at:]


def splice(rng: random.Random, text: bytes) -> bytes:
    other = rng.choice(hlo_seeds())
    return text[: rng.randrange(len(text) + 1)] + other[rng.randrange(len(other)) :]


def rename(rng: random.Random, text: bytes) -> bytes:
    """Replace one name by another: cycles of calls, missing callees, values used before they are defined."""
    found = list(re.finditer(rb"%[\w.\-]+", text))
    if not found:
        return insert(rng, text)
    where, other = rng.choice(found), rng.choice(found)
    return text[: where.start()] + other[0] + text[where.end() :]


TEXT: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(flip, delete, duplicate, swap_lines, drop_lines, truncate, blow_up, blow_up, blow_up_value, insert, nest),
    *(splice, rename, rename),
)


def make_hlo(rng: random.Random) -> tuple[str, bytes]:
    """(mutation, input): one mutation in most cases, several in others; now and then compressed or in UTF-16."""
    text = rng.choice(hlo_seeds())
    chosen = [rng.choice(TEXT) for _ in range(rng.choice((1, 1, 1, 1, 2, 4)))]
    for mutate in chosen:
        text = mutate(rng, text)
    if rng.random() < 0.02:
        text = text.decode("latin-1").encode("utf-16")
    if rng.random() < 0.02:
        text = rng.choice((flip, truncate, duplicate))(rng, gzip.compress(text, 1, mtime=0))
    return chosen[0].__name__, text
