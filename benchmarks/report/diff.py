"""The section of diffs, from its result: sentences, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import to_builtins

from benchmarks import diff_view as strategy_view
from benchmarks.diff_strategies import StrategyDiff
from benchmarks.documents.diff import Diffs
from benchmarks.report.blocks import BAD, FAIR, GOOD, Block, Cell, Details, Items, Table, Text, from_rich
from benchmarks.report.pictures import Draw
from benchmarks.words import counted
from shardiff.diff import Diff
from shardiff.diff.view import notes, table
from shardiff.program import Program
from shardiff.record import step_bytes, totals
from shardiff.system.words import size


def diffs(result: Diffs) -> list[StrategyDiff]:
    """The diffs of a result, as `shardiff diff` shows them."""
    made = []
    for one, run in zip(result.diffs, result.runs_of_diffs(), strict=True):
        left = Program(tuple(one.left.records), "written", run.mesh)
        right = Program(tuple(one.right.records), "derived", run.mesh, one.right.memory)
        work = to_builtins(one.right.work)
        found = Diff(left, right, tuple(one.rows))
        made.append(StrategyDiff(run, one.target, found, one.left.traced, one.closed_form.records, work))
    return made


def summary(result: Diffs) -> Iterator[str]:
    found = diffs(result)
    targets, strategies = {one.target for one in found}, {one.run.strategy for one in found}
    verdicts = [row.verdict for one in found for row in one.diff.rows]
    same = verdicts.count("same")
    unexplained = sum(one.diff.unexplained for one in found)
    rewritten = len(verdicts) - same - unexplained
    rules = {rule for one in found for row in one.diff.rows for rule in row.rules}
    where = f"{counted(len(strategies), 'strategy', 'strategies')} on {counted(len(targets), 'target')}"
    under = f"{rewritten} are rewritten under {counted(len(rules), 'rule')}"
    groups = counted(len(verdicts), "group", "groups")
    yield f"{where}: of {groups} of collectives, {same} are derived as written, {under}, {unexplained} are unexplained."
    by = [(step_bytes(d.diff.right) / sent, d) for d in found if (sent := step_bytes(d.diff.left))]
    if by:
        (least, first), (most, last) = min(by, key=lambda one: one[0]), max(by, key=lambda one: one[0])
        yield (
            f"The derived wire bytes are {least:.2f} times those written at the least ({first.run.strategy}, "
            f"{first.target}) and {most:.2f} times at the most ({last.run.strategy}, {last.target})."
        )


def blocks(result: Diffs, draw: Draw) -> Iterator[Block]:
    found = diffs(result)
    for strategy in dict.fromkeys(one.run.strategy for one in found):
        mine = [one for one in found if one.run.strategy == strategy]
        yield diff_table(strategy, mine)
        text = f"Wire bytes of {strategy}, as written and as derived for each target"
        yield from draw(
            f"diff_{strategy.replace(' ', '')}", text, lambda path, mine=mine: strategy_view.picture(mine, path)
        )
        told = [notes(one.diff.rows, strategy_view.SIDES).splitlines() for one in mine]
        sentences = list(dict.fromkeys(line for lines in told for line in lines))
        yield Items(sentences) if sentences else Text("All as written.")
        alike: dict[str, tuple[Table, list[str]]] = {}  # targets for which XLA derives the same
        for one in mine:
            records = records_table(one)
            alike.setdefault(repr(records), (records, []))[1].append(one.target)
        yield from (Details(f"{strategy} for {', '.join(names)}", [records]) for records, names in alike.values())
    yield from (Text(f"{one.target} was left out: {one.reason}", "warning") for one in result.skipped)
    yield Text(
        "Written: traced in a real run of torch processes, one training step. Derived: read from the program that XLA "
        "compiled for the target, which need not be here. Bytes are those that a rank must send under the "
        "bandwidth-optimal algorithm.",
        "note",
    )


def named(verdict: str) -> str:
    """A verdict, with the names of the sides."""
    written, derived = strategy_view.SIDES
    return verdict.replace("left", written).replace("right", derived)


def diff_table(strategy: str, found: Sequence[StrategyDiff]) -> Table:
    """One line for each target: what a rank sends in one step, and the verdicts."""
    columns = (
        "target",
        "ranks",
        "calls",
        "written",
        "derived",
        "closed form",
        "derived / written",
        "verdicts",
        "rules",
    )
    rows = []
    for one in found:
        calls = [totals(records)["calls"]["max"] for records in (one.diff.left, one.diff.right)]
        written, derived, formula = map(step_bytes, (one.diff.left, one.diff.right, one.closed_form))
        verdicts = [named(row.verdict) for row in one.diff.rows]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        style = BAD if one.diff.unexplained else FAIR if "rewritten" in verdicts else GOOD
        rules = list(dict.fromkeys(rule.replace("_", " ") for row in one.diff.rows for rule in row.rules))
        cells = [one.target, str(one.run.world_size), " / ".join("?" if n is None else str(n) for n in calls)]
        cells += [*map(size, (written, derived, formula)), f"{derived / written:.2f}" if written else "-"]
        rows.append([*map(Cell, cells), Cell(counts, style), Cell(", ".join(rules))])
    return Table(columns, [False, *[True] * 6, False, False], rows, f"{strategy}: what a rank sends in one step")


def records_table(one: StrategyDiff) -> Table:
    """Every collective of a diff, with numbers in place of the terminal's bars."""
    shown = from_rich(table(one.diff.rows, strategy_view.SIDES))
    amounts = (
        [re.sub("[\u2580-\u259f]", "", line).strip() for line in row[-1].text.splitlines()] for row in shown.rows
    )
    rows = [[*row[:-1], Cell("\n".join(lines))] for row, lines in zip(shown.rows, amounts, strict=True)]
    return Table([*shown.columns[:-1], "wire bytes, written and derived"], [False] * 4 + [True], rows)
