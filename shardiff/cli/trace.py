"""`shardiff trace`: run any torch program in N processes as torchrun would, and show what they communicate."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardiff import budget
from shardiff.diff.record_view import table
from shardiff.formats import as_csv, as_github, as_junit, as_markdown
from shardiff.program import Program
from shardiff.record import SCHEMA, Record, totals
from shardiff.summary import Summary, summarize, totals_text, view
from shardiff.system.files import unwritable, write
from shardiff.system.inputs import read_json
from shardiff.tracing.calls import ranks_text
from shardiff.tracing.timeline import as_perfetto
from shardiff.tracing.torchrun import under_torchrun
from shardiff.tracing.traced import Options, Traced, trace_program

STATUS = {"mismatch": 1, "deadlock": 1, "stuck": 3}
FORMATS = ("table", "json", "csv", "markdown", "perfetto", "github", "junit")
FULL = 40  # records that are shown one by one; of more, a summary


@dataclass(frozen=True)
class Request:
    """What the command line asks for: what to run, what to look for, and what to show.

    target: a script, or with `module` a module's name. steps: so many are told one by one. every: show each record.
    """

    target: str
    arguments: Sequence[str] = ()
    module: bool = False
    nproc: int | None = None
    options: Options = Options()
    format: str = "table"
    steps: int | None = None
    every: bool = False
    fail_on: Sequence[str] = ()
    baseline: Path | None = None
    update_baseline: bool = False


def refusal(asked: Request) -> str | None:
    """Why this cannot be traced, in one line; None if it can."""
    nproc, timeout = asked.nproc, asked.options.timeout
    if nproc is not None and nproc < 1:
        return f"nproc must be at least 1, got {nproc}"
    if asked.module:
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", asked.target):
            return f"{asked.target!r} is no name of a module; a file is traced without -m"
    elif not (script := Path(asked.target)).is_file():
        return f"{script}: {'is a directory' if script.is_dir() else 'no such file'}"
    elif not os.access(script, os.R_OK):
        return f"{script}: cannot be read"
    if "RANK" in os.environ and not under_torchrun():
        return "RANK is set, but not by torchrun: unset it, or start shardiff by torchrun"
    if under_torchrun() and nproc not in (None, int(os.environ["WORLD_SIZE"])):
        return f"torchrun has started {os.environ['WORLD_SIZE']} processes already, so nproc cannot be {nproc}"
    if timeout is not None and not 0 < timeout < math.inf:
        return f"timeout must be a number of seconds above 0, got {timeout}"
    verify = asked.options.verify or asked.options.strict
    if verify and under_torchrun() and os.environ["WORLD_SIZE"] != os.environ.get("LOCAL_WORLD_SIZE"):
        return "verify needs all processes on one machine, and torchrun has others elsewhere"
    if asked.format not in FORMATS:
        return f"unknown format {asked.format!r}; known: {', '.join(FORMATS)}"
    if asked.steps is not None and asked.steps < 1:
        return f"steps must be at least 1, got {asked.steps}"
    if asked.update_baseline and asked.baseline is None:
        return "--update-baseline needs --baseline FILE, the file to write"
    if asked.baseline and asked.update_baseline and (reason := unwritable(asked.baseline)):
        return f"{asked.baseline}: cannot be written: {reason}"
    if asked.baseline and not asked.update_baseline and not asked.baseline.is_file():
        return f"{asked.baseline}: no such file; --update-baseline writes it"
    try:
        for text in asked.fail_on:
            budget.parse_budget(text)
        if asked.baseline and not asked.update_baseline:
            baseline_records(asked.baseline)
    except ValueError as error:
        return str(error)
    return None


def baseline_records(path: Path) -> list[Record]:
    """The records of a baseline. Raises ValueError, one line, for a file that holds none."""
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("records"), list):
        raise ValueError(f"{path}: holds no records; --update-baseline writes it anew")
    try:
        return [Record.from_json(fields) for fields in content["records"]]
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def show(asked: Request) -> int:
    """Run, print, and return the exit status: the program's; 1 if the ranks disagree or a budget is exceeded; 3 if they
    were stuck; 130 or 143 if interrupted. Under torchrun each process runs its rank, and rank 0 prints for all."""
    label = shlex.join([*(["-m"] if asked.module else []), asked.target, *asked.arguments])
    kind = "module" if asked.module else "script"
    options = replace(asked.options, quiet=asked.format != "table")
    traced = trace_program(kind, asked.target, asked.arguments, asked.nproc, options, label)
    if isinstance(traced, int):
        return traced
    over: list[str] = []
    more: list[str] = []
    status = traced.status or (STATUS[traced.verdict.kind] if traced.verdict else 1 if traced.errors else 0)
    try:
        over = budget.check(traced.program, map(budget.parse_budget, asked.fail_on))
    except ValueError as error:
        over = [str(error)]
    if asked.baseline and asked.update_baseline and not traced.status:
        write(asked.baseline, document(traced))
    elif asked.baseline:
        more = budget.compare(traced.program, baseline_records(asked.baseline))
    notes = [*traced.notes, *jax_note(asked, traced.program)]
    traced = replace(traced, errors=[*traced.errors, *over, *more], notes=notes)
    present(asked, traced, {"the ranks agree": traced.errors, "budgets": over, "baseline": more})
    return status or int(bool(over or more))


def present(asked: Request, traced: Traced, checks: dict[str, list[str]]) -> None:
    """Print, in the format that was asked for."""
    program = traced.program
    summary = summarize(program)
    if asked.format == "table":
        return show_table(asked, traced, summary)
    problems = [*traced.errors, *traced.warnings, *traced.notes]
    disagreed = [line for line in traced.errors if line not in checks["budgets"] + checks["baseline"]]
    if asked.format == "json":
        text = json.dumps(document(traced, asked.steps), indent=2) + "\n"
    elif asked.format == "csv":
        text = as_csv(program.records)
    elif asked.format == "markdown":
        text = as_markdown(program.records, headline(traced, summary), problems)
    elif asked.format == "perfetto":
        text = as_perfetto(traced.calls) + "\n"
    elif asked.format == "github":
        text = as_github(traced.errors, traced.warnings, "; ".join([headline(traced, summary), *traced.notes]))
    else:
        text = as_junit(f"shardiff trace {program.label}", checks | {"the ranks agree": disagreed})
    sys.stdout.write(text)
    if asked.format in ("csv", "perfetto"):  # which have no place for them
        for line in problems:
            print(f"shardiff: {line}", file=sys.stderr)


def document(traced: Traced, steps: int | None = None) -> dict[str, Any]:
    """As JSON. The records are those of the whole run; `segments` has them by step."""
    program, summary = traced.program, summarize(traced.program)

    def part(records: Sequence[Record]) -> dict[str, Any]:
        return {"records": [record.to_json() for record in records], "totals": totals(records)}

    return {
        "schema": SCHEMA,
        "program": program.label,
        "ranks": traced.num_ranks,
        **part(program.records),
        "busiest_rank": vars(summary.busiest) if summary.busiest else None,
        "idlest_rank": vars(summary.idlest) if summary.idlest else None,
        "disagreements": traced.errors,
        "warnings": traced.warnings,
        "notes": traced.notes,
        "segments": {name: part(each.records) for name, each in chosen(program, steps).items()},
    }


def chosen(program: Program, steps: int | None) -> dict[str, Program]:
    """The segments, but of the steps only so many."""
    left = set([name for name in program.segments if name.startswith("step ")][:steps])
    return {name: part for name, part in program.segments.items() if name in left or not name.startswith("step ")}


def headline(traced: Traced, summary: Summary) -> str:
    """A line: what ran, and what it sent in all."""
    return f"{traced.program.label}, {ranks_text(range(traced.num_ranks))}: {totals_text(summary)}"


def show_table(asked: Request, traced: Traced, summary: Summary) -> None:
    """For people."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    program = traced.program

    def records(part: Program) -> None:
        if part.records and (asked.every or len(part.records) <= FULL):
            console.print(table(part.records, by_rank=True))
        elif part.records:
            console.print(view(summarize(part)))
            console.print(f"{len(part.records):,} records; --all shows each", markup=False)

    if asked.steps is None:
        records(program)
    else:
        told: list[tuple[str, Program]] = []
        for name, part in chosen(program, asked.steps).items():
            if told and told[-1][1].records == part.records and told[-1][0].startswith("step "):
                told[-1] = (f"{told[-1][0].partition(' to ')[0]} to {name.removeprefix('step ')}, each", part)
            else:
                told.append((name, part))
        for name, part in told:
            console.print(f"{name}: {totals_text(summarize(part))}", markup=False)
            records(part)
        if not program.steps:
            console.print("no end of a step was seen: no optimizer's step, and no shardiff.step()")
    console.print(headline(traced, summary), markup=False)
    headings = (
        ("[bold red]Wrong:[/]", traced.errors),
        ("[bold yellow]Ranks meet with different things, which may be wrong:[/]", traced.warnings),
        ("[bold]Note:[/]", traced.notes),
    )
    for heading, lines in headings:
        if lines:
            console.print(heading)
        for line in lines:
            console.print(line, markup=False)


def jax_note(asked: Request, program: Program) -> list[str]:
    """What to do where the program communicates by JAX, which the tracer does not see."""
    with suppress(OSError, ImportError, ValueError, AttributeError):
        spec = find_spec(asked.target) if asked.module and "." not in asked.target else None
        path = Path(spec.origin or "") if spec else Path(asked.target)
        text = path.read_text(errors="replace")
        if not program.records and re.search(r"^\s*(import jax|from jax)\b", text, re.MULTILINE):
            return [
                f"{path.name} uses JAX, whose collectives XLA derives when it compiles; trace sees torch.distributed. "
                "Write a function step(mesh) that returns (function, arguments), and run: "
                f"shardiff compile {path.name}:step --target cpu:8 --mesh dp=8"
            ]
    return []
