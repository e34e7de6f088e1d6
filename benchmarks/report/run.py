"""The measurements of a report. Each is a command of shardiff in a process of its own, so that torch and jax start
fresh, whatever a command holds ends with it, and its progress goes to the terminal.

A finished section is on disk as NAME.json, with the command that made it. It is used again if the same command would
run on the same machine with the same versions and commit; a commit with uncommitted changes is never the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.documents.results_io import SCHEMA, read_file, same_origin
from contract.axes import CORE, STRATEGIES
from contract.problem import Problem
from contract.strategy import Run
from shardiff.system import machine
from shardiff.system.files import keeper

Document = dict[str, Any]

QUICK = {
    "check": "check --width 256 " + " ".join(f"--strategy {name}" for name in CORE),
    "collectives": "bench collectives --size 4KiB --size 64KiB --size 1MiB --iterations 3 --budget 0.05",
    "steps": "bench steps --ranks 2 --iterations 5 --rounds 1 --batch 64 --width 512 --speed-batch 256 "
    + " ".join(f"--strategy {name}" for name in ("single_device", *STRATEGIES) if not name.startswith("zero")),
    "bubbles": "bench bubbles --stages 2 --schedule gpipe --microbatches 1 --microbatches 4 --iterations 3 --batch 512 "
    "--width 512 --layers 4",
}
FULL = {
    "check": "check",
    "collectives": "bench collectives",
    "steps": "bench steps",
    "bubbles": "bench bubbles",
}
PATIENCE = 5.0  # seconds that an interrupted command has to end
COMMAND = """
import signal, sys
from shardiff.system.processes import when_parent_ends
when_parent_ends(signal.SIGKILL)
from shardiff.cli.main import main
sys.exit(main())
"""
STOPPED = 25  # seconds that a command may be stopped


class Failed(Exception):
    """A command that ended without a result. Its own error is on standard error."""


def command(section: str, quick: bool, timeout: float | None = None) -> str:
    """The command that measures a section, as it would be typed after `shardiff`."""
    patience = [] if timeout is None else [f"--timeout {timeout:g}"]
    if section != "diff":
        return " ".join([(QUICK if quick else FULL)[section], *patience])
    layers = 4 if quick else 8  # a stage of a pipeline has at least one
    parts = ["diff", *(CORE if quick else STRATEGIES), *patience, f"--layers {layers}"]
    return " ".join([*parts, *(f"--target {target}" for target in targets(quick))])


def targets(quick: bool) -> list[str]:
    """One of each family whose compiler is installed; quick: one of each kind, of 4 devices."""
    from shardiff.compiling.hardware import known

    if not quick:
        return [one.family.examples[0] for one in known() if one.compiler]
    kinds = {one.family.kind for one in known() if one.compiler}
    return [target for kind, target in (("cpu", "cpu:4"), ("gpu", "h100:4"), ("tpu", "v5e:2x2")) if kind in kinds]


def finished(section: str, line: str, directory: Path) -> Document | None:
    """What the same command measured before on the same machine, if it did."""
    with suppress(ValueError):
        document = read_file(directory / f"{section}.json")[section]
        if document.get("command") == line and document.get("complete", True):
            return document if same_origin(document["machine"], machine.facts()) else None
    return None


def unfinished(section: str, directory: Path, since: float) -> Document | None:
    """The part of its result that a failed command has written since a time.time()."""
    file = directory / f"{section}.json"
    with suppress(ValueError, OSError):
        return read_file(file)[section] if file.stat().st_mtime >= since else None
    return None


def measure(section: str, line: str, directory: Path) -> Document:
    """Run a command and write NAME.json. Raises Failed, and KeyboardInterrupt if the command was interrupted."""
    file = directory / f"{section}.json"
    if section == "diff":
        document = diffs(line)
    elif section == "check":
        document = json.loads(output(line))
    else:
        bench(line, file)
        document = json.loads(file.read_text(encoding="utf-8"))
    document = {"command": line, **document}
    keeper(file)(document)
    return document


def bench(line: str, file: Path) -> None:
    """Run a benchmark. What an interrupted one has left in the file is kept if all its settings are the same."""
    with suppress(ValueError):
        (left,) = read_file(file).values()
        if not left.get("complete", True) and same_origin(left["machine"], machine.facts()):
            try:
                output(f"{line} --resume --output", str(file))
                return
            except Failed as error:
                if not str(error).endswith("status 2"):  # other settings, said in a line: all is measured anew
                    raise
    output(f"{line} --output", str(file))


def diffs(line: str) -> Document:
    """The result of the diff, whose command prints one object on each line."""
    layers = int(line.partition("--layers ")[2].split()[0])
    settings = {**asdict(Problem(layers=layers)), "microbatches": Run().microbatches, "device": "cpu"}
    head = {"kind": "diff", "schema": SCHEMA, "complete": True, "machine": machine.facts(), "settings": settings}
    try:
        return {**head, "diffs": [json.loads(one) for one in output(line).splitlines()], "skipped": []}
    except Failed:
        first, *pairs = line.split(" --target ")
        if len(pairs) < 2:
            raise
    found, skipped = [], []  # one compiler that refuses must not hide what the others derive
    for target in pairs:
        try:
            found += [json.loads(one) for one in output(f"{first} --target {target}").splitlines()]
        except Failed as error:
            skipped.append({"target": target, "reason": str(error)})
    return {**head, "diffs": found, "skipped": skipped}


def output(line: str, *rest: str) -> str:
    """What `shardiff LINE --json` prints; its progress and errors go where ours go."""
    command = [sys.executable, "-P", "-c", COMMAND, *line.split(), *rest, "--json"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed = wait(process)
        except BaseException:  # Ctrl-C reaches both; whoever stops us alone must not leave the command behind
            for end in (process.terminate, process.kill):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                    break
                end()
            raise
    if process.returncode == 130:
        raise KeyboardInterrupt
    if process.returncode not in (0, 1):
        raise Failed(f"shardiff {line} ended with status {process.returncode}")
    return printed


def wait(process: subprocess.Popen[str]) -> str:
    """What a command prints until it ends. It notices stuck ranks itself; a command that is stopped is ended here."""
    stopped = 0
    while True:
        try:
            return process.communicate(timeout=1)[0]
        except subprocess.TimeoutExpired:
            with suppress(psutil.Error):  # counted, not timed: Ctrl-Z stops both, and then nobody counts
                is_stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                stopped = stopped + 1 if is_stopped else 0
            if stopped > STOPPED:
                print("shardiff: the command was stopped and did not continue, so it is ended", file=sys.stderr)
                process.kill()
