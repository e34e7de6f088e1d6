"""The section of diffs, from its result: sentences, tables and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import to_builtins

from benchmarks import diff_view as strategy_view
from benchmarks.diff_strategies import Diff
from benchmarks.documents.diff import Diffs
from benchmarks.report.blocks import BAD, FAIR, GOOD, Block, Cell, Details, Items, Table, Text, from_rich
from benchmarks.report.pictures import Draw
from shardiff.diff import view as diff_view
from shardiff.diff.rules import Row, step_bytes
from shardiff.record import totals
from shardiff.system.words import size


def diffs(result: Diffs) -> list[Diff]:
    """The diffs of a result, as `shardiff diff` shows them."""
    made = []
    for one, run in zip(result.diffs, result.runs_of_diffs(), strict=True):
        rows = [
            Row(
                row.verdict,
                tuple(row.rule.split("+")) if row.rule else (),
                tuple(row.explicit),
                tuple(row.derived),
                {"explicit": row.bytes.explicit, "derived": row.bytes.derived},
                row.why,
            )
            for row in one.rows
        ]
        records = {
            "explicit": one.explicit.records,
            "derived": one.derived.records,
            "closed_form": one.closed_form.records,
        }
        work = to_builtins(one.derived.work)
        made.append(
            Diff(
                run=run,
                target=one.target,
                rows=rows,
                traced=one.explicit.traced,
                memory=one.derived.memory,
                work=work,
                **records,
            )
        )
    return made


def summary(result: Diffs) -> Iterator[str]:
    found = diffs(result)
    targets, strategies = {one.target for one in found}, {one.run.strategy for one in found}
    verdicts = [row.verdict for one in found for row in one.rows]
    same, rewritten = verdicts.count("same"), verdicts.count("rewritten")
    rules = {rule for one in found for row in one.rows for rule in row.rules}
    yield (
        f"For {len(strategies)} strategies on {len(targets)} targets, {same} groups of collectives are derived as "
        f"written, {rewritten} rewritten under {len(rules)} rules, and {len(verdicts) - same - rewritten} unexplained."
    )
    by = [(step_bytes(d.derived) / sent, d) for d in found if (sent := step_bytes(d.explicit))]
    if by:
        (least, first), (most, last) = min(by, key=lambda one: one[0]), max(by, key=lambda one: one[0])
        text = f"Wire bytes derived are {least:.2f} times those written at least ({first.run.strategy}, {first.target})"
        yield f"{text}, {most:.2f} times at most ({last.run.strategy}, {last.target})."


def blocks(result: Diffs, draw: Draw) -> Iterator[Block]:
    found = diffs(result)
    for strategy in dict.fromkeys(one.run.strategy for one in found):
        mine = [one for one in found if one.run.strategy == strategy]
        yield diff_table(strategy, mine)
        text = f"Wire bytes of {strategy}, as written and as derived for each target"
        yield from draw(f"diff_{strategy}", text, lambda path, mine=mine: strategy_view.picture(mine, path))
        notes = [diff_view.rule_notes(one.rows, one.explicit, one.derived).splitlines() for one in mine]
        sentences = list(dict.fromkeys(line for lines in notes for line in lines))
        yield Items(sentences) if sentences else Text("All as written.")
        alike: dict[str, tuple[Table, list[str]]] = {}  # targets for which XLA derives the same
        for one in mine:
            table = records_table(one)
            alike.setdefault(repr(table), (table, []))[1].append(one.target)
        yield from (Details(f"{strategy} for {', '.join(names)}", [table]) for table, names in alike.values())
    yield from (Text(f"{one.target} was left out: {one.reason}", "warning") for one in result.skipped)
    yield Text(
        "Written: traced in a real run of torch processes, one training step. Derived: read from the program that XLA "
        "compiled for the target, which need not be here. Bytes are those that a rank must send under the "
        "bandwidth-optimal algorithm.",
        "note",
    )


def diff_table(strategy: str, found: Sequence[Diff]) -> Table:
    """One line a target: what a rank sends in one step, and the verdicts."""
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
        calls = [totals(records)["calls"]["max"] for records in (one.explicit, one.derived)]
        written, derived, formula = map(step_bytes, (one.explicit, one.derived, one.closed_form))
        verdicts = [row.verdict for row in one.rows]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
        style = BAD if any(v.startswith("only") for v in verdicts) else FAIR if "rewritten" in verdicts else GOOD
        rules = list(dict.fromkeys(rule.replace("_", " ") for row in one.rows for rule in row.rules))
        cells = [one.target, str(one.run.world_size), " / ".join("?" if n is None else str(n) for n in calls)]
        cells += [*map(size, (written, derived, formula)), f"{derived / written:.2f}" if written else "-"]
        rows.append([*map(Cell, cells), Cell(counts, style), Cell(", ".join(rules))])
    return Table(columns, [False, *[True] * 6, False, False], rows, f"{strategy}: what a rank sends in one step")


def records_table(one: Diff) -> Table:
    """Every collective of a diff, with numbers in place of the terminal's bars."""
    (table,) = diff_view.render(one.explicit, one.derived, one.rows, "written", "derived")
    shown = from_rich(table)  # type: ignore[arg-type]
    rows = [[*row[:-1], Cell(re.sub("[\u2580-\u259f]+ *", "", row[-1].text).strip())] for row in shown.rows]
    return Table([*shown.columns[:-1], "wire bytes, written and derived"], [False] * 4 + [True], rows)
