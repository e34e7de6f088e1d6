"""`make mutants`: a table of every planted mistake and what catches it.

Two run at a time: the mistakes in training one after the other, and beside them the tests of the other mistakes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from contract.axes import ON_AXES
from shared_tests import quick
from shared_tests.meta.mutants.in_copy import failure
from shared_tests.meta.mutants.judge import judge
from shared_tests.meta.mutants.planted import PLANTED, Planted
from shared_tests.meta.mutants.training import MUTANTS, Mutant

PARTS = tuple("strategies training collectives schedules planner reader diff figures verifier ranks api".split())
CLAIMS_TEST = "shared_tests/meta/test_mutants.py::test_a_mistake_fails_just_the_claims_that_it_names"


class Line(NamedTuple):
    """A mistake and its outcome. said: the claims that failed, or how the test failed."""

    part: str
    name: str
    file: str
    test: str
    seconds: float
    caught: bool
    said: str


def try_planted(planted: Planted) -> Line:
    """Run the test that must fail."""
    began = time.perf_counter()
    try:
        said = failure(planted)
    except ValueError as error:  # the edit does not fit
        said = str(error)
    seconds = time.perf_counter() - began
    caught = said.startswith(planted.words)
    return Line(planted.part, planted.name, str(planted.file), planted.test, seconds, caught, said or "the test passes")


def part_of(mutant: Mutant) -> str:
    """The part of the project in which the mistake is planted."""
    leaf = mutant.module.rpartition(".")[2]
    return "strategies" if leaf in ON_AXES else "collectives" if leaf == "collectives" else "training"


def try_training(done: Callable[[Line], None]) -> None:
    """Run all mistakes in training, in worker processes (torch) and in this one (JAX)."""
    from shardiff.ranks.torch_pool import workers

    quick.prepare(8)
    with workers(8, "cpu", timeout=60) as pool:
        for mutant in MUTANTS:
            began = time.perf_counter()
            verdict = judge(mutant, pool)
            claims = ", ".join(sorted(verdict.claims)) or "nothing fails"
            file = mutant.module.replace(".", "/") + ".py"
            seconds = time.perf_counter() - began
            done(Line(part_of(mutant), mutant.name, file, CLAIMS_TEST, seconds, verdict.caught(mutant), claims))


def table(lines: Sequence[Line]) -> str:
    """The mistakes by part, and how many are caught."""
    width = max(len(line.name) for line in lines)
    rows = []
    for part in dict.fromkeys(line.part for line in lines):
        mine = [line for line in lines if line.part == part]
        rows += ["", f"{part}: {sum(line.caught for line in mine)} of {len(mine)} caught"]
        for line in mine:
            test = line.test.removeprefix("shared_tests/")
            test = f"{test} ({line.said})" if line.test == CLAIMS_TEST else test
            caught = test if line.caught else f"NOT CAUGHT by {test}: {line.said}"
            rows.append(f"  {line.name:{width}}  {line.file:44}  {line.seconds:5.1f} s  {caught}")
    return "\n".join([*rows, "", f"{sum(line.caught for line in lines)} of {len(lines)} planted mistakes are caught"])


def main() -> int:
    """Try all mistakes, with progress on stderr, print the table, and return 1 if one is not caught."""
    lines: list[Line] = []
    total = len(MUTANTS) + len(PLANTED)

    def done(line: Line) -> None:
        lines.append(line)
        print(f"{len(lines)} of {total}: {line.name}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(try_training, done)]
        futures += [executor.submit(lambda planted=planted: done(try_planted(planted))) for planted in PLANTED]
        for future in futures:
            future.result()
    order = {name: i for i, name in enumerate([m.name for m in (*MUTANTS, *PLANTED)])}
    lines.sort(key=lambda line: (PARTS.index(line.part), order[line.name]))
    print(table(lines))
    return 0 if all(line.caught for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
