"""The sections of a report, from the documents of its results: sentences computed from them, tables and pictures.

The tables are those that the commands print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.bubbles import view as bubbles_view
from benchmarks.collectives import view as collectives_view
from benchmarks.report import diff as report_diff
from benchmarks.report import pictures as report_pictures
from benchmarks.report.blocks import BAD, GOOD, Block, Cell, Details, Items, Section, Table, Text, from_rich
from benchmarks.report.pictures import Draw, drawn, not_drawn
from benchmarks.steps import view as steps_view
from benchmarks.steps import why as steps_why
from benchmarks.steps.numbers import CONTEXT, PEERS
from contract.proof import LIMITS
from shardiff.system import machine
from shardiff.system.words import size

Document = dict[str, Any]

TITLES = {
    "check": "All equal one reference",
    "diff": "Communication written, and derived",
    "collectives": "Bandwidth of collectives",
    "steps": "Training steps, and their memory",
    "bubbles": "The bubble of a pipeline",
}
ERRORS = {"loss_error": "loss", "grad_error": "gradients", "param_error": "parameters"}


def section(key: str, document: Document) -> Section:
    """A result as a chapter."""
    shown = [Text(line) for line in summary(key, document)] + blocks(key, document)
    if not document.get("complete", True):
        shown.insert(0, Text("Partial: the measurement did not come to its end.", "warning"))
    return Section(key, TITLES[key], shown, caption(document))


def caption(document: Document) -> str:
    """Machine, cores, versions, backend, commit, date, and the command where it is known."""
    facts, settings = document["machine"], document.get("settings", {})
    others = ", ".join(f"{name} {v}" for name, v in facts["versions"].items() if v and name not in ("torch", "jax"))
    backend = {"cpu": "CPU processes over gloo", "cuda": "CUDA over NCCL"}.get(settings.get("device"), "")
    commit = f"commit {facts['commit'][:10]}{'+' * facts['commit'].endswith('+')}" if facts["commit"] else ""
    date = f"{facts['date'][:16].replace('T', ' ')} UTC"
    command = f"shardiff {document['command']}" if document.get("command") else ""
    return "; ".join(filter(None, (machine.summary(facts), facts["os"], others, backend, commit, date, command)))


def summary(key: str, document: Document) -> list[str]:
    """What the data says, in sentences."""
    return list(_SUMMARIES[key](document))


def blocks(key: str, document: Document, pictures: bool = True) -> list[Block]:
    """All of a section but its sentences. pictures: drawn, which takes a second each."""
    return list(_BLOCKS[key](document, drawn if pictures else not_drawn))


def check_summary(document: Document) -> Iterator[str]:
    rows = document["rows"]
    held = sum(row["passed"] for row in rows)
    errors = [(row[key], name, row) for row in rows for key, name in ERRORS.items() if row[key] is not None]
    text = f"{held} of {len(rows)} runs equal the single-device float64 reference"
    if errors:
        error, name, row = max(errors, key=lambda one: one[0])
        text += f"; the largest relative error is {error:.1e} ({name} of {row['implementation']} {row['strategy']})"
    yield text + "."


def check_blocks(document: Document, draw: Draw) -> Iterator[Block]:
    words = ("implementation", "strategy", "mesh", "dtype", "optimizer")
    rows = []
    for row in document["rows"]:
        errors = [Cell("not finite" if row[key] is None else f"{row[key]:.1e}") for key in ERRORS]
        verdict = Cell("equal", GOOD) if row["passed"] else Cell("DIFFERS", BAD)
        rows.append([*(Cell(str(row[name])) for name in words), *errors, verdict])
    yield Table([*words, *ERRORS.values(), "verdict"], [False] * 5 + [True] * 3 + [False], rows)
    limits = ", ".join(f"{dtype} {limit:g}" for dtype, limit in LIMITS.items())
    yield Text(
        f"Errors are ||got - want|| / ||want||. A row passes up to {limits}; bfloat16 up to twice the error of the "
        "same framework on a single device. Gradients, parameters and optimizer state are compared in full, losses "
        f"at every one of {max((row['steps'] for row in document['rows']), default=0)} steps.",
        "note",
    )


def collectives_summary(document: Document) -> Iterator[str]:
    if document["flat"]:
        yield document["flat"]["sentence"]
    measured = [row for row in document["rows"] if row["mode"] == "per_iteration" and row["busbw_GBps"]]
    if measured:
        best = max(measured, key=lambda row: row["busbw_GBps"])
        yield (
            f"The highest busbw is {best['busbw_GBps']:.3g} GB/s ({best['implementation']} {best['op']} of "
            f"{collectives_view.size(best['bytes'])} on {best['ranks']} ranks); a copy in memory reaches "
            f"{document['floor']['memory_copy_GBps']:.3g} GB/s."
        )


def collectives_blocks(document: Document, draw: Draw) -> Iterator[Block]:
    if document["rows"]:
        text = "busbw of each collective over its payload, with the fit of t = alpha + S/beta and loopback's bandwidth"
        yield from draw("bandwidth", text, lambda path: report_pictures.bandwidth(document, path))
    tables = []
    for ranks in document["settings"]["ranks"]:
        rows = [row for row in document["rows"] if row["ranks"] == ranks]
        if any(one["ranks"] == ranks for one in document["fits"]):
            yield from_rich(collectives_view.fit_table(document["fits"], ranks))
        if rows:
            tables.append(from_rich(collectives_view.table(rows, ranks)))
    yield from (Details(f"Times and bandwidths: {table.title}", [table]) for table in tables)
    *lines, _ = collectives_view.lines(document)  # the machine stands in the caption, the first sentence on top
    yield Details("How it was measured", [Items(lines[bool(document["flat"]) :])])


def steps_summary(document: Document) -> Iterator[str]:
    ranks = max((row["ranks"] for row in document["rows"]), default=0)
    ratios = [row for row in document["ratios"] if row["ranks"] == ranks]
    peers = {name for by in PEERS.values() for names in by.values() for name in names} - set(CONTEXT)
    pairs = {
        "torch over what a user would pick instead": [r for r in ratios if r["of"] == "torch" and r["to"] in peers],
        "shard_map over annotated": [r for r in ratios if (r["of"], r["to"]) == ("shard_map", "annotated")],
        "torch over annotated": [r for r in ratios if (r["of"], r["to"]) == ("torch", "annotated")],
    }
    for name, rows in pairs.items():
        if rows:
            each = (
                f"{r['strategy']}{' / ' + r['to'] if r['to'] in peers else ''} {r['ratio']['median']:.2f}" for r in rows
            )
            yield f"Step time on {ranks} ranks, {name}: {', '.join(each)}."
    held = [[steps_view.total(row["memory"][key]) for key in ("measured", "closed_form")] for row in document["rows"]]
    shares = [measured / formula for measured, formula in held if measured is not None and formula]
    if shares:
        worst = max(shares, key=lambda share: abs(share - 1))
        yield (
            "Parameters, gradients and optimizer state of every contestant take what the closed form says, to within "
            f"{abs(worst - 1):.1%}."
        )
    yield from (f"Not the same training: {failure}." for failure in document["failures"])


def steps_blocks(document: Document, draw: Draw) -> Iterator[Block]:
    if document["rows"]:
        text = "Step time of every contestant, split into compute and exposed communication, whiskers at the quartiles"
        yield from draw("steps", text, lambda path: steps_view.picture(document, path))
    titles = ("Step times, memory held and wire bytes", "Ratios of step times", "A single device against its own rates")
    tables = [from_rich(table, title) for table, title in zip(_step_tables(document), titles, strict=True) if table]
    yield from tables[1:] + [Details(tables[0].title, tables[:1])]
    if any(any(value for value in row["memory"]["measured"].values()) for row in document["rows"]):
        text = "Memory of the rank that holds most, measured and by the closed form, by kind"
        yield from draw("memory", text, lambda path: report_pictures.memory(document, path))
        yield Details("Memory by kind", [memory_table(document)])
    if reasons := steps_why.reasons(document):
        yield Details("Where shard_map and annotated differ", [Items([f"{reason}." for reason in reasons])])
    yield Text(steps_view.setting(document) + ".", "note")
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in document["method"].items()])])


def _step_tables(document: Document) -> list[Any]:
    rates = steps_view.rate_table(document) if document["single_device"] else None
    return [steps_view.step_table(document), steps_view.ratio_table(document), rates]


def memory_table(document: Document) -> Table:
    """Measured bytes of every kind, and by the closed form."""
    kinds = report_pictures.KINDS
    rows = []
    for row in document["rows"]:
        measured, formula = row["memory"]["measured"], row["memory"]["closed_form"] or {}
        cells = [row["strategy"], str(row["ranks"]), row["implementation"]]
        both = ([v.get(kind) for v in (measured, formula)] for kind in kinds)
        cells += [" / ".join("-" if v is None else size(v) for v in pair) for pair in both]
        rows.append([Cell(cell) for cell in cells])
    columns = ["strategy", "ranks", "implementation", *(kind.replace("_", " ") for kind in kinds)]
    return Table(columns, [False, True, False] + [True] * len(kinds), rows, "measured / closed form")


def bubbles_summary(document: Document) -> Iterator[str]:
    for stages in dict.fromkeys(row["stages"] for row in document["rows"]):
        mine = [r for r in document["rows"] if r["stages"] == stages and r["implementation"] == "torch"]
        if not mine:
            continue
        first, last = mine[0], mine[-1]
        shares = [r["of_theory"] for r in mine]
        yield (
            f"The bubble of {stages} stages in torch takes {first['measured']['median']:.0%} of the stages' time with "
            f"{first['microbatches']} microbatch{'es' * (first['microbatches'] > 1)} and "
            f"{last['measured']['median']:.0%} with {last['microbatches']}; the closed form says {first['theory']:.0%} "
            f"and {last['theory']:.0%}. Measured over closed form: {min(shares):.2f} to {max(shares):.2f}."
        )
    yield from (f"{one['reason']}: not measured." for one in document["skipped"])


def bubbles_blocks(document: Document, draw: Draw) -> Iterator[Block]:
    if document["rows"]:
        text = "Timelines of the stages, in which the bubble is hatched, and measured bubbles beside the closed form"
        yield from draw("bubbles", text, lambda path: bubbles_view.picture(document, path))
    yield from_rich(bubbles_view.table(document))  # type: ignore[arg-type]
    notes = bubbles_view.notes(document)[len(document["skipped"]) :]
    yield Items(notes)
    yield Details("How it was measured", [Items([f"{name}: {how}." for name, how in document["method"].items()])])


_SUMMARIES: dict[str, Callable[[Document], Iterator[str]]] = {
    "check": check_summary,
    "diff": report_diff.summary,
    "collectives": collectives_summary,
    "steps": steps_summary,
    "bubbles": bubbles_summary,
}
_BLOCKS: dict[str, Callable[[Document, Draw], Iterator[Block]]] = {
    "check": check_blocks,
    "diff": report_diff.blocks,
    "collectives": collectives_blocks,
    "steps": steps_blocks,
    "bubbles": bubbles_blocks,
}
