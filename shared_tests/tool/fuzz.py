"""`make fuzz`: mutated HLO text and mutated JSON through everything that reads them.

Each input must give an answer or be refused in one line, within SECONDS and MEMORY. HLO goes through `shardiff hlo` and
then `shardiff diff A.json B.json`; JSON goes through `diff A B`, `report A B` and the reading of
`report --results`. An input is made from the campaign's seed and its own number, so that each can be made again alone:

    python -m shared_tests.tool.fuzz --seed 0 --again hlo:4711 > input
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("hlo_cases")
SECONDS = 5  # of a core, that one input may take
STUCK = 120  # seconds without an answer after which a process counts as stuck where no signal reaches it
MEMORY = 10**9  # bytes of address space that an input may take beside what the process had
SMALL = 12_000  # bytes of the largest seed of text
KINDS = ("hlo", "json")

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
VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 1, 10**18, 10**400, -(10**30), 1.5, 1e308, -1e308, 5e-324, "", "x")
VALUES += ("[/]", "[bold]", "a\nb", "\0", "\x1b[2J", "<script>", "é", "٣", "0", "nan", [], {}, [[]], [None], {"": None})
VALUES += ([1, 2], [[0, 1], [2, 3]], {"min": 2, "max": None}, {"min": 10**18, "max": 10**18}, "all_reduce", "forward")


class Flaw(Exception):
    """What an input made the program do that it must not."""


@dataclass
class Tally:
    """What became of the inputs. outcomes: of a kind, by mutation; failures: (kind, number, what happened)."""

    outcomes: dict[str, Counter[tuple[str, str]]] = field(default_factory=lambda: {kind: Counter() for kind in KINDS})
    failures: list[tuple[str, int, str]] = field(default_factory=list)
    slowest: dict[str, tuple[float, int]] = field(default_factory=lambda: dict.fromkeys(KINDS, (0.0, -1)))
    peak_bytes: int = 0

    def add(self, other: Tally) -> None:
        """Take in another's."""
        for kind in KINDS:
            self.outcomes[kind] += other.outcomes[kind]
            self.slowest[kind] = max(self.slowest[kind], other.slowest[kind])
        self.failures += other.failures
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)

    def count(self, kind: str) -> int:
        """Inputs of a kind that have ended, well or not."""
        return sum(self.outcomes[kind].values())


# Seeds


@cache
def hlo_seeds() -> tuple[bytes, ...]:
    """The cases of the tests; of large ones, the header and some computations, with that of a collective first."""
    small = [file.read_bytes() for file in sorted(CASES.glob("[!b]*.hlo.txt"))]
    large = [excerpt(file.read_bytes()) for file in sorted(CASES.glob("real/*.hlo.txt"))]
    return tuple(seed for seed in [*small, *large] if seed)


def excerpt(text: bytes) -> bytes:
    """A large dump's header, its shortest computations, and the end of its ENTRY."""
    header, *computations = re.split(rb"\n(?=(?:ENTRY )?%\S+ \()", text)
    kept, size = [], 0
    for computation in sorted(computations[:-1], key=len):
        if (size := size + len(computation)) > SMALL // 2:
            break
        kept.append(computation)
    first, *lines = computations[-1].splitlines()
    communicating = [line for line in lines if re.search(rb" (all-|reduce-scatter|collective-|while|fusion)", line)]
    last = lines[-3:]
    return b"\n".join([header[:2000], *kept, first, *[line[:1000] for line in communicating[:12]], *last]) + b"\n"


@cache
def json_seeds() -> dict[str, tuple[Any, ...]]:
    """Documents of every kind that is read: "records" and "results"."""
    from shared_tests.bench import report_documents

    records = []
    for file in sorted(CASES.glob("*.hlo.txt")):
        with contextlib.suppress(ValueError):
            from shardiff.cli.hlo import to_json
            from shardiff.hlo import read_bytes

            records.append(to_json(file.name, read_bytes(file.read_bytes(), file.name)))
    traced = {
        "program": "train.py",
        "ranks": 2,
        "records": records[0]["records"],
        "totals": {},
        "disagreements": [],
    }
    results = list(report_documents.everything().values())
    report = {"kind": "report", "schema": 1, "quick": True, "machine": report_documents.MACHINE, "summary": {}}
    whole = {**report, "failures": {}, "sections": report_documents.everything()}
    made = {"records": [*records, traced], "results": [*results, whole]}
    return {kind: tuple(json.loads(json.dumps(one)) for one in many) for kind, many in made.items()}


# Mutations of text


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
    """Give one name another's place: cycles of calls, missing callees, values used before they are there."""
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


# Mutations of documents


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key or index) of a document."""
    todo = [node]
    while todo:
        here = todo.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], dict | list):
                todo.append(here[key])


def make_json(rng: random.Random) -> tuple[str, bytes]:
    """(mutation, input): a document with other values, without some or with more of them, or its text mutated."""
    which = rng.choice(("records", "results"))
    document = json.loads(json.dumps(rng.choice(json_seeds()[which])))
    name = rng.choice(("value", "value", "value", "key", "repeat", "deep", "text"))
    for _ in range(rng.choice((1, 1, 2, 5))):
        # First a kind of place, or a document's few settings would be lost among its many samples.
        by_name: dict[str, list[tuple[Any, Any]]] = {}
        for container, key in places(document):
            by_name.setdefault(str(key), []).append((container, key))
        if not by_name:
            break
        container, key = rng.choice(by_name[rng.choice(list(by_name))])
        if name == "value":
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif name == "key" and isinstance(container, dict):
            value = container.pop(key)
            if rng.random() < 0.5:
                container[rng.choice(("", "kind", "schema", str(key) + " ", "[/]"))] = value
        elif name == "key":
            del container[key]
        elif name == "repeat" and isinstance(container, list):
            container += [copy.deepcopy(container[key]) for _ in range(rng.choice((1, 3, 100)))]
        elif name == "deep":
            for _ in range(rng.choice((1, 2, 50))):
                container[key] = rng.choice(([container[key]], {"x": container[key]}))
    text = json.dumps(document).encode()
    if name == "text":
        number = rng.random()
        chosen = rng.choice((flip, delete, duplicate, truncate, blow_up, insert, nest))
        text = (
            text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))) if number < 0.1 else chosen(rng, text)
        )
        if 0.1 < number < 0.15:
            text = b"[" * 100_000 + text + b"]" * 100_000
    return f"{which}: {name}", text


MAKERS = {"hlo": make_hlo, "json": make_json}


def make(kind: str, seed: int, number: int) -> tuple[str, bytes]:
    """(mutation, input) of this number."""
    return MAKERS[kind](random.Random(f"{seed} {kind} {number}"))


# What is done with them


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Flaw when so much of a core's time is used up: not that of a clock, which other programs make go faster."""

    def over(*_: object) -> None:
        raise Flaw(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.5)  # again, where Python swallows what is raised
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def spoken(command: Callable[[], int]) -> tuple[int, str]:
    """(status, standard output) of a command that may answer or refuse, as `main` would let it. Raises Flaw."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command()
        except ValueError as error:
            if type(error) is not ValueError and not type(error).__module__.startswith("benchmarks."):
                raise
            print(f"shardiff: {error}", file=err)
            status = 2
    said = err.getvalue()
    if status == 2 and (not said.startswith("shardiff: ") or said.count("\n") != 1 or len(said) > 2000):
        raise Flaw(f"refused, but not in one line: {said[:300]!r}")
    if status in (0, 1) and (said or not out.getvalue()):
        raise Flaw(f"status {status} with {len(out.getvalue())} bytes on stdout, on stderr: {said[:300]!r}")
    if status not in (0, 1, 2):
        raise Flaw(f"status {status}")
    return status, out.getvalue()


def no_constant(name: str) -> None:
    raise Flaw(f"the JSON that was printed holds {name}")


def try_hlo(data: bytes, number: int, directory: Path) -> str:
    """What becomes of a file of HLO text: "answer" or "refused". Raises Flaw or what the program raises."""
    from shardiff.cli import hlo as hlo_files

    file, answer = directory / "input.hlo", directory / "answer.json"
    file.write_bytes(data)
    status, printed = spoken(lambda: hlo_files.show([str(file)], as_json=True))
    if status == 2:
        return "refused"
    json.loads(printed, parse_constant=no_constant)
    if number % 4 == 0:
        spoken(lambda: hlo_files.show([str(file)], as_json=False))
    answer.write_text(printed)
    other = directory / "before.json"
    if number % 4 == 1 and other.exists():
        pair = (answer, other) if number % 8 == 1 else (other, answer)
        status, printed = spoken(lambda: diff_files(*pair, number % 16 < 8))
        if status == 2:
            raise Flaw(f"diff refuses what hlo has printed: {printed}")
    if number % 4 == 2:
        answer.replace(other)
    return "answer"


def try_json(data: bytes, number: int, directory: Path) -> str:
    """What becomes of a file of JSON: "answer" if any command takes it, else "refused"."""
    from benchmarks.documents import results_io
    from benchmarks.report import command
    from benchmarks.report import sections as report_sections

    file, records, results = directory / "input.json", directory / "records.json", directory / "results.json"
    file.write_bytes(data)
    if not records.exists():
        records.write_text(json.dumps(json_seeds()["records"][1]))
        results.write_text(json.dumps(json_seeds()["results"][-1]))
    as_json, swapped = number % 2 == 0, number % 4 < 2
    a, b = (file, records) if swapped else (records, file)
    compared, _ = spoken(lambda: diff_files(a, b, as_json))
    a, b = (file, results) if swapped else (results, file)
    reported, _ = spoken(lambda: command.answer_comparison(a, b, "slower", True, as_json))
    if reported != 2:
        documents = results_io.read(file)
        if number % 8 == 0 and len(documents) == 1:
            for section, document in documents.items():
                report_sections.section(section, results_io.parse(section, document))  # with its pictures
    return "refused" if compared == reported == 2 else "answer"


def diff_files(a: Path, b: Path, as_json: bool) -> int:
    """What `shardiff diff` does with two files."""
    from shardiff.cli import diff as of_files

    found = of_files.diff_files(a, b)
    of_files.show(found, as_json)
    return int(found.fails("unexplained"))


TRY = {"hlo": try_hlo, "json": try_json}


def one(kind: str, seed: int, number: int, directory: Path) -> tuple[str, str, str]:
    """(mutation, "answer", "refused" or "failed", what failed)."""
    mutation, data = make(kind, seed, number)
    try:
        with time_limit(SECONDS):
            return mutation, TRY[kind](data, number, directory), ""
    except Flaw as flaw:
        return mutation, "failed", str(flaw)
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
        return mutation, "failed", f"{type(error).__name__}: {str(error)[:200]} ({place})"


# The campaign


def serve(jobs: list[tuple[str, int]], seed: int, root: str, connection: Connection) -> None:
    """A process's share of the inputs: before each its place in `jobs` is sent, every so often a Tally."""
    directory = Path(tempfile.mkdtemp(dir=root))
    hlo_seeds(), json_seeds()
    one("hlo", 0, 0, directory), one("json", 0, 0, directory)  # imports, and what they take
    statm = Path("/proc/self/statm").read_text().split()
    limit = int(statm[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tally, last = Tally(), time.monotonic()
    for place, (kind, number) in enumerate(jobs):
        connection.send(place)
        began = time.process_time()
        mutation, outcome, why = one(kind, seed, number, directory)
        tally.slowest[kind] = max(tally.slowest[kind], (time.process_time() - began, number))
        tally.outcomes[kind][mutation, outcome] += 1
        if why:
            tally.failures.append((kind, number, why))
        if time.monotonic() - last > 0.5 or place == len(jobs) - 1:
            tally.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            connection.send(tally)
            tally, last = Tally(), time.monotonic()
    connection.send(None)


@dataclass
class Share:
    """A process and the inputs that it has left. A process that dies or hangs is replaced by one for what is left."""

    jobs: list[tuple[str, int]]
    seed: int
    root: str = ""
    place: int = 0
    heard: float = field(default_factory=time.monotonic)

    def start(self) -> None:
        self.ours, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(self.jobs, self.seed, self.root, theirs)
        )
        self.process.start()
        theirs.close()
        self.heard = time.monotonic()

    def lost(self, tally: Tally, why: str) -> None:
        """Note what happened to the input that the process was at, and go on behind it."""
        self.process.kill()
        self.process.join()
        kind, number = self.jobs[self.place]
        tally.failures.append((kind, number, why))
        self.jobs, self.place = self.jobs[self.place + 1 :], 0
        if self.jobs:
            self.start()


def campaign(counts: dict[str, int], seed: int, processes: int, progress: Callable[[Tally], None]) -> Tally:
    """All inputs in so many processes, whose files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="shardiff-fuzz-") as root:
        return _campaign(counts, seed, processes, progress, root)


def _campaign(counts: dict[str, int], seed: int, processes: int, progress: Callable[[Tally], None], root: str) -> Tally:
    jobs = [(kind, number) for kind in KINDS for number in range(counts[kind])]
    shares = [Share(jobs[i::processes], seed, root) for i in range(min(processes, len(jobs)))]
    tally = Tally()
    for share in shares:
        share.start()
    while running := [share for share in shares if share.jobs]:
        ready = wait([share.ours for share in running], timeout=1)
        for share in running:
            if share.ours in ready:
                try:
                    message = share.ours.recv()
                except EOFError:
                    share.process.join()
                    share.lost(tally, f"the process ended with {share.process.exitcode}")
                    continue
                share.heard = time.monotonic()
                if message is None:
                    share.jobs = []
                    share.process.join()
                elif isinstance(message, int):
                    share.place = message
                else:
                    tally.add(message)
                    progress(tally)
            elif time.monotonic() - share.heard > STUCK:
                share.lost(tally, f"stuck: no answer for {STUCK} s, and no signal reached it")
    return tally


def table(tally: Tally) -> Any:
    """A line for each mutation."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("input", "mutation", "inputs", "answered", "refused in a line", "failed"):
        made.add_column(name, justify="left" if name in ("input", "mutation") else "right")
    for kind in KINDS:
        counts = tally.outcomes[kind]
        names = sorted({mutation for mutation, _ in counts})
        for name in names:
            each = [counts[name, outcome] for outcome in ("answer", "refused", "failed")]
            made.add_row(kind if name == names[0] else "", name.replace("_", " "), *map(str, (sum(each), *each)))
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_tests.tool.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--hlo", type=int, default=100_000, metavar="N")
    parser.add_argument("--json-files", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--again", metavar="KIND:NUMBER", help="print this input, and what becomes of it on stderr")
    options = parser.parse_args(argv)
    if options.again:
        kind, _, number = options.again.partition(":")
        sys.stdout.buffer.write(make(kind, options.seed, int(number))[1])
        with tempfile.TemporaryDirectory() as directory:
            print(*one(kind, options.seed, int(number), Path(directory)), file=sys.stderr)
        return 0

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = {"hlo": options.hlo, "json": options.json_files}
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        tasks = {kind: progress.add_task(kind, total=counts[kind]) for kind in KINDS}

        def show(tally: Tally) -> None:
            for kind in KINDS:
                progress.update(tasks[kind], completed=tally.count(kind))

        tally = campaign(counts, options.seed, options.processes, show)
    console = Console(highlight=False, soft_wrap=True)
    console.print(table(tally))
    for kind, number, why in tally.failures:
        console.print(f"{kind}:{number} {why}", markup=False)
    document = to_json(tally, counts, options.seed, options.processes, time.monotonic() - began)
    for line in document["sentences"]:
        console.print(line, markup=False)
    if options.output:
        from shardiff.system.files import write

        write(options.output, document)
    return 1 if tally.failures else 0


def to_json(tally: Tally, counts: dict[str, int], seed: int, processes: int, seconds: float) -> dict[str, Any]:
    """The result as plain JSON types."""
    from shardiff.system import machine

    rows = []
    sentences = []
    for kind in KINDS:
        sums = {outcome: 0 for outcome in ("answer", "refused", "failed")}
        for mutation in sorted({mutation for mutation, _ in tally.outcomes[kind]}):
            each = {outcome: tally.outcomes[kind][mutation, outcome] for outcome in sums}
            rows.append({"input": kind, "mutation": mutation, **each})
            sums = {outcome: sums[outcome] + each[outcome] for outcome in sums}
        failed = len([one for one in tally.failures if one[0] == kind])
        slowest, number = tally.slowest[kind]
        sentences.append(
            f"{counts[kind]:,} mutated {kind} files: {sums['answer']:,} answered, {sums['refused']:,} refused in one "
            f"line, {failed} failed; the slowest, number {number}, took {slowest:.2f} s of a core."
        )
    sentences.append(
        f"At most {tally.peak_bytes / 1e6:.0f} MB of memory in a process; {seconds:.0f} s in {processes} processes."
    )
    return {
        "kind": "fuzz",
        "schema": 1,
        "machine": machine.facts(),
        "settings": {**counts, "seed": seed, "processes": processes, "seconds_limit": SECONDS, "memory_limit": MEMORY},
        "sentences": sentences,
        "rows": rows,
        "slowest": {kind: {"seconds": s, "number": number} for kind, (s, number) in tally.slowest.items()},
        "peak_bytes": tally.peak_bytes,
        "seconds": seconds,
        "failures": [{"input": kind, "number": number, "what": why} for kind, number, why in tally.failures],
    }


if __name__ == "__main__":
    sys.exit(main())
