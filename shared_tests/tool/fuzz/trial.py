"""What is done with one input, and what must never happen."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from shared_tests.tool.fuzz.documents import make
from shared_tests.tool.fuzz.seeds import json_seeds

SECONDS = 5  # of a core, that one input may take


class Flaw(Exception):
    """What the program must never do, and did for an input."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Flaw after so many seconds of CPU time. Time on the wall would depend on what else is running.

    It is the time in user mode, whose signal no profiler in the same process sends.
    """

    def over(*_: object) -> None:
        raise Flaw(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)  # again, where Python swallows what is raised
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def spoken(command: Callable[[], int]) -> tuple[int, str]:
    """(status, standard output) of a command that may answer or refuse, as `main` would let it. Raises Flaw."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command()
        except ValueError as error:
            if type(error) is not ValueError and not type(error).__module__.startswith(("benchmarks.", "shardiff.")):
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
    from shardiff.cli import diff as command

    pair = command.plan([str(a), str(b)], (None, None), (None, None), None, None, "unexplained")
    return command.run(pair, False, "unexplained", as_json)


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
