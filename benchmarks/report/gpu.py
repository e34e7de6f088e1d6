"""The chapter on what needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.documents.gpu import Floor, Gpu, Program, Proof, Rank, Step
from benchmarks.report.blocks import BAD, GOOD, Block, Cell, Details, Items, Table, Text
from benchmarks.report.pictures import Draw
from benchmarks.words import binary_size, counted, duration
from shardiff.system.words import size


def summary(result: Gpu) -> Iterator[str]:
    if result.settings.device == "cpu":
        yield "This is a rehearsal on the CPU at small sizes: it shows that the parts run, and nothing about a GPU."
    done = sum(part.status == "done" for part in result.parts)
    yield f"{done} of {counted(len(result.parts), 'part')} were completed."
    if result.proofs:
        held = sum(proof.passed for proof in result.proofs)
        yield f"{held} of {counted(len(result.proofs), 'run')} equal the single-device float64 reference."
    for part in result.parts:
        if tests := part.reached.tests:
            yield f"pytest -m gpu: {tests.passed} passed, {tests.failed} failed, {tests.skipped} skipped."
    for step in steps(result):
        if step.dtype == "bfloat16":
            yield (
                f"A {step.dtype} step of the {step.model} in {step.framework} {step.implementation} at width "
                f"{step.width} reaches {step.share:.2f} of the measured rate of matrix products."
            )
    if programs := [program for part in result.parts for program in part.reached.programs]:
        alike = sum(not program.differences for program in programs)
        yield (
            f"{alike} of {counted(len(programs), 'program')} that were compiled for the device have the same "
            "collectives as for the target."
        )
    for part in result.parts:
        if part.status in ("failed", "out of time"):
            yield f"{part.name}: {part.status}: {(part.reason or '').splitlines()[-1]}."


def steps(result: Gpu) -> list[Step]:
    """Those of all parts."""
    return [step for part in result.parts for step in part.reached.steps]


def blocks(result: Gpu, draw: Draw) -> Iterator[Block]:
    rows = [
        [
            Cell(part.name),
            Cell(part.does),
            Cell(part.status, GOOD if part.status == "done" else BAD),
            Cell(f"{part.seconds:.0f} s"),
        ]
        for part in result.parts
    ]
    yield Table(["part", "what it shows", "status", "time"], [False, False, False, True], rows)
    if rates := [rate for part in result.parts for rate in part.reached.rates]:
        cells = [
            [
                Cell(rate.framework),
                Cell(rate.dtype),
                Cell(f"{rate.flops_per_second / 1e12:.3g}"),
                Cell(f"{rate.copy_bytes_per_second / 1e12:.3g}"),
            ]
            for rate in rates
        ]
        columns = ["framework", "dtype", "matrix products, TFLOP/s", "copy, TB/s"]
        yield Table(columns, [False, False, True, True], cells, "Rates of the device")
    if steps(result):
        yield step_table(steps(result))
    ranks = [rank for part in result.parts for rank in part.reached.ranks]
    if ranks:
        yield rank_table(ranks)
    if failing := [proof for proof in result.proofs if not proof.passed]:
        yield Items([f"{named(proof)}: {'; '.join(proof.failures).splitlines()[-1]}" for proof in failing])
    if result.proofs:
        yield Details("Every run against the reference", [proof_table(result.proofs)])
    if programs := [program for part in result.parts for program in part.reached.programs]:
        title = "Programs for this device and for the target"
        lines = [f"{named(p)}, {line}" for p in programs for line in p.differences]
        yield Details(title, [program_table(programs), *([Items(lines)] if lines else [])])
    if floors := [floor for part in result.parts for floor in part.reached.floors]:
        yield Details("Floors: copies, and collectives of one rank", [floor_table(floors)])
    facts = ", ".join(f"{name} {value}" for name, value in [*result.gpu.items(), *result.packages.items()] if value)
    yield Text(f"{facts}." if facts else "No facts of a GPU.", "note")


def named(one: Proof | Program | Rank) -> str:
    """In the words of the table of a check."""
    of_blocks = f" {one.model}" if isinstance(one, Proof) and one.model != "MLP" else ""
    return f"{one.implementation} {one.strategy} {one.mesh} {one.dtype}{of_blocks}"


def step_table(rows: list[Step]) -> Table:
    columns = [
        "framework",
        "implementation",
        "model",
        "dtype",
        "batch",
        "sequence",
        "width",
        "layers",
        "step",
        "TFLOP/s",
    ]
    columns += ["share", "update", "most memory"]
    cells = [
        [
            Cell(row.framework),
            Cell(row.implementation),
            Cell(row.model),
            Cell(row.dtype),
            *(Cell(str(number)) for number in (row.batch, row.sequence, row.width, row.layers)),
            Cell(duration(row.step_seconds.median)),
            Cell(f"{row.flops_per_second / 1e12:.3g}"),
            Cell(f"{row.share:.2f}"),
            Cell("-" if row.update_share is None else f"{row.update_share:.2f}"),
            Cell("-" if row.peak_bytes is None else size(row.peak_bytes)),
        ]
        for row in rows
    ]
    title = "Steps: share of the rate of matrix products, and the update's of the rate of a copy"
    return Table(columns, [False] * 4 + [True] * 9, cells, title)


def rank_table(rows: list[Rank]) -> Table:
    cells = [
        [
            Cell(row.implementation),
            Cell(row.strategy),
            Cell(row.mesh),
            Cell(row.dtype),
            Cell(duration(row.step_seconds.median)),
        ]
        for row in rows
    ]
    columns = ["implementation", "strategy", "mesh", "dtype", "step"]
    return Table(columns, [False] * 4 + [True], cells, "One rank of many, whose collectives do nothing on a GPU")


def proof_table(rows: list[Proof]) -> Table:
    cells = [
        [
            *(Cell(word) for word in (row.model, row.implementation, row.strategy, row.mesh, row.dtype)),
            *(Cell("-" if e is None else f"{e:.1e}") for e in (row.loss_error, row.grad_error, row.param_error)),
            Cell("equal", GOOD) if row.passed else Cell("DIFFERS", BAD),
        ]
        for row in rows
    ]
    columns = ["model", "implementation", "strategy", "mesh", "dtype", "loss", "gradients", "parameters", "verdict"]
    return Table(columns, [False] * 5 + [True] * 3 + [False], cells)


def program_table(rows: list[Program]) -> Table:
    def pair(values: list[int | None]) -> Cell:
        return Cell(" / ".join("-" if value is None else size(value) for value in values))

    cells = [
        [
            *(Cell(word) for word in (row.implementation, row.strategy, row.mesh, row.target)),
            Cell("same", GOOD) if not row.differences else Cell("differs", BAD),
            pair(row.wire_bytes),
            *(pair(row.memory.get(kind, [])) for kind in ("argument", "output", "temp")),
        ]
        for row in rows
    ]
    columns = ["implementation", "strategy", "mesh", "target", "collectives", "wire bytes"]
    columns += ["arguments", "outputs", "temporaries"]
    return Table(columns, [False] * 5 + [True] * 4, cells, "this device / the target")


def floor_table(rows: list[Floor]) -> Table:
    cells = [
        [
            Cell(row.framework),
            Cell(row.op),
            Cell(binary_size(row.bytes)),
            Cell(duration(row.seconds)),
            Cell(f"{row.bytes_per_second / 1e9:.3g}"),
        ]
        for row in rows
    ]
    return Table(["framework", "op", "size", "time", "GB/s"], [False, False, True, True, True], cells)
