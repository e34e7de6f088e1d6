"""`make mutation`: runs mutmut and reports for each module how many mutants were killed and which survived.

Its files are in mutants/, so it can be interrupted and continues where it stopped. If it is run again, it tries those
mutants again that survived without a reason. The exit status is 1 if a mutant survives that is not known to be
equivalent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from shardiff.system import machine
from shardiff.system.files import write
from shared_tests.meta.mutation.equivalent import why_equivalent

ROOT = Path(__file__).parents[3]
MUTANTS = ROOT / "mutants"
MUTMUT = Path(sys.executable).with_name("mutmut")
PROCESSES = 2
COLUMNS = ("killed", "timeout", "no tests", "equivalent", "survived")


class Mutant(NamedTuple):
    """name: module, function and number. status: one of COLUMNS, as far as it was tried."""

    name: str
    status: str

    @property
    def function(self) -> str:
        """module.function or module.Class.method, from mutmut's mangled name."""
        module, _, mangled = self.name.partition("__mutmut_")[0].rpartition(".")
        return f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def parse(results: str) -> list[Mutant]:
    """The mutants in the output of `mutmut results --all true`."""
    lines = (line.strip().rpartition(": ") for line in results.splitlines() if "__mutmut_" in line)
    return [Mutant(name, status) for name, _, status in lines]


def changed_lines(diff: str) -> tuple[str, str]:
    """(what a mutant removes, what it adds), from the output of `mutmut show`."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    removed, added = ("\n".join(line[1:] for line in lines if line.startswith(sign)) for sign in "-+")
    return removed, added


def judged(mutants: Iterable[Mutant], show: Callable[[str], str]) -> tuple[list[Mutant], list[dict[str, str]]]:
    """The mutants, those known to be equivalent set apart; what was not killed, each with its lines and the reason.

    show: the name of a mutant -> its diff.
    """
    result, survivors = [], []
    for mutant in mutants:
        if mutant.status in ("survived", "no tests"):
            old, new = changed_lines(show(mutant.name))
            why = why_equivalent(mutant.function, old, new)
            survivors.append({"name": mutant.name, "old": old.strip(), "new": new.strip(), "equivalent": why or ""})
            mutant = mutant._replace(status="equivalent" if why else mutant.status)
        result.append(mutant)
    return result, survivors


def by_module(mutants: Iterable[Mutant]) -> dict[str, dict[str, int]]:
    """Module -> how many mutants in all, and of each status."""
    counts: dict[str, Counter[str]] = {}
    for mutant in mutants:
        module = mutant.name.partition(".x")[0]
        counts.setdefault(module, Counter())[mutant.status] += 1
    return {
        module: {
            "mutants": found.total(),
            **{status: found[status] for status in (*COLUMNS, *(found.keys() - COLUMNS))},
        }
        for module, found in sorted(counts.items())
    }


def table(modules: dict[str, dict[str, int]]) -> str:
    """A row for each module, and their sum."""
    columns = list(dict.fromkeys(column for counts in modules.values() for column in counts))
    total = {column: sum(counts.get(column, 0) for counts in modules.values()) for column in columns}
    width = max(map(len, modules))
    rows = [f"{'':{width}}  " + "  ".join(columns)]
    for module, counts in [*modules.items(), ("all", total)]:
        cells = (f"{counts.get(column, 0):{len(column)}}" for column in columns)
        rows.append(f"{module:{width}}  " + "  ".join(cells))
    return "\n".join(rows)


def mutmut(*arguments: str) -> str:
    """The output of one of mutmut's commands, run in this process, because there may be hundreds."""
    from click.testing import CliRunner
    from mutmut.__main__ import cli

    with chdir(ROOT):  # where mutmut looks for its settings
        return CliRunner().invoke(cli, arguments, catch_exceptions=False).output


def forget(names: Iterable[str]) -> None:
    """Make mutmut try these again."""
    names = set(names)
    for file in MUTANTS.rglob("*.meta"):
        known = json.loads(file.read_text(encoding="utf-8"))
        if again := names & known["exit_code_by_key"].keys():
            known["exit_code_by_key"] |= dict.fromkeys(again)  # None: not tried
            file.write_text(json.dumps(known, indent=4), encoding="utf-8")


def all_results() -> list[Mutant]:
    """Every mutant, with its status as far as it was tried."""
    return parse(mutmut("results", "--all", "true")) if MUTANTS.exists() else []


def run(names: list[str]) -> None:
    """Let mutmut try `names`; without names, what is left and what survived without a reason.

    There may be new tests for the latter. What times out is tried once more, because the machine may have been busy.
    """
    command = [MUTMUT, "run", "--max-children", str(PROCESSES)]
    before = all_results()
    if not names:
        forget(one["name"] for one in judged(before, lambda name: mutmut("show", name))[1] if not one["equivalent"])
    (MUTANTS / "mutmut-stats.json").unlink(missing_ok=True)  # which tests reach which function, to be found out again
    subprocess.run([*command, *names], cwd=ROOT, check=True)
    if slow := {one.name for one in set(all_results()) - set(before) if one.status == "timeout"}:
        subprocess.run([*command, *sorted(slow)], cwd=ROOT, check=True)


def main(arguments: list[str]) -> int:
    """Run mutmut, print the table and the survivors, and write the result to a file if asked to."""
    parser = argparse.ArgumentParser(prog="python -m shared_tests.meta.mutation", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help='mutants to try, such as "contract.cost.*"; all that are left, if none'
    )
    parser.add_argument("--anew", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--report", action="store_true", help="try none, only tell what is known")
    parser.add_argument("--output", type=Path, help="a .json file for the result")
    asked = parser.parse_args(arguments)
    if asked.anew:
        shutil.rmtree(MUTANTS, ignore_errors=True)
    if not asked.report:
        run(asked.names)
    mutants, survivors = judged(all_results(), lambda name: mutmut("show", name))
    modules = by_module(mutants)
    print(table(modules))
    for one in survivors:
        if not one["equivalent"]:
            print(f"\n{one['name']}\n  - {one['old']}\n  + {one['new']}")
    if asked.output:
        document = {"kind": "mutation", "machine": machine.facts(), "mutmut": machine.version("mutmut")}
        write(asked.output, {**document, "modules": modules, "not_killed": survivors})
    return 1 if any(mutant.status in ("survived", "no tests") for mutant in mutants) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
