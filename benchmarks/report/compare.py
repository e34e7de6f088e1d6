"""Two results compared, figure by figure: `shardiff report A B`.

A figure is flagged if each value lies outside the other's spread: the new value outside the old quartiles, and the old
value outside the new ones. The spreads of collectives go from the minimum to the 99th percentile. Counts and bytes have
no spread and are flagged when they differ; what was measured only once is never flagged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.documents.bubbles import Bubbles
from benchmarks.documents.check import Check
from benchmarks.documents.collectives import Collectives
from benchmarks.documents.diff import Diffs
from benchmarks.documents.experts import Imbalance
from benchmarks.documents.fields import Spread
from benchmarks.documents.gpu import Gpu
from benchmarks.documents.results_io import Section
from benchmarks.documents.steps import Steps
from benchmarks.words import binary_size, counted
from shardiff.diff.rows import unexplained
from shardiff.record import totals

Document = dict[str, Any]
SLOWER = "slower"


@dataclass(frozen=True)
class Figure:
    """A number. spread: the range in which it varies, None for an exact number. better: 1 if more is better, -1 if less
    is, else 0. unit: "s", "GB/s", "FLOP/s", "bytes", "share", "error" or ""."""

    value: float
    unit: str
    spread: tuple[float, float] | None = None
    better: int = 0


Figures = dict[tuple[str, str], Figure]  # (what, setting)


def figures(result: Section) -> Figures:
    """All figures of a result that can be compared."""
    return {(what, setting): figure for what, setting, figure in _FIGURES[type(result)](result)}


def _check(result: Check) -> Iterator[tuple[str, str, Figure]]:
    for row in result.rows:
        name = f"{row.implementation} {row.strategy}"
        setting = f"mesh {row.mesh}, {row.dtype}, {row.optimizer}, {counted(row.steps, 'step')}"
        setting += "" if result.settings.model == "mlp" else f", {result.settings.model}"
        yield f"{name}: equal", setting, Figure(int(row.passed), "")
        errors = {"loss": row.loss_error, "gradient": row.grad_error, "parameter": row.param_error}
        for of, error in errors.items():
            if error is not None:
                yield f"{name}: {of} error", setting, _once(error, "error")


def _diff(result: Diffs) -> Iterator[tuple[str, str, Figure]]:
    for one in result.diffs:
        name, setting = f"{one.strategy} {one.implementation} {one.target}", str(one.problem or result.settings)
        for side, word in ((one.left, "written"), (one.right, "derived")):
            sent = totals(side.records)["wire_bytes"]["min"]
            yield f"{name}: wire bytes {word}", setting, Figure(sent, "bytes")
        yield f"{name}: unexplained", setting, Figure(unexplained(one.rows), "")


def _collectives(result: Collectives) -> Iterator[tuple[str, str, Figure]]:
    setting = result.settings.transport
    for row in result.rows:
        what = f"{row.implementation} {row.op} {counted(row.ranks, 'rank')} {binary_size(row.bytes)}"
        yield f"{what}: {row.mode.replace('_', ' ')}", setting, Figure(row.median_s, "s", (row.min_s, row.p99_s), -1)
    if result.floor:
        yield "memory copy", setting, _once(result.floor.memory_copy_GBps, "GB/s")
        for streams, value in result.floor.loopback_GBps.items():
            yield f"loopback, {streams} streams", setting, _once(value, "GB/s")


def _steps(result: Steps) -> Iterator[tuple[str, str, Figure]]:
    setting = f"{result.settings}, {result.settings.optimizer}"
    for row in result.rows:
        name = f"{row.strategy} {row.label} {row.on}"
        times = {"step": row.step_seconds, "compute": row.compute_seconds, "exposed": row.exposed_seconds}
        for of, time in times.items():
            if time:
                yield f"{name}: {of}", setting, _spread(time, "s", -1)
        for kind, count in row.memory.measured.by_kind().items():
            if count is not None:
                yield f"{name}: {kind.replace('_', ' ')}", setting, Figure(count, "bytes")
    for row in result.ratios:
        name = f"{row.strategy} {row.on}: {row.of} / {row.to}"
        yield name, setting, _spread(row.ratio, "", 0)
    for row in result.single_device:
        name = f"single device {row.framework} batch {row.batch}"
        yield f"{name}: matmul", setting, _spread(row.matmul_flops_per_second, "FLOP/s", 1)
        yield f"{name}: forward backward", setting, _spread(row.forward_backward_flops_per_second, "FLOP/s", 1)


def _bubbles(result: Bubbles) -> Iterator[tuple[str, str, Figure]]:
    for row in result.rows:
        microbatches = counted(row.microbatches, "microbatch", "microbatches")
        name = f"{row.implementation} {row.order} {counted(row.stages, 'stage')} {microbatches}"
        yield f"{name}: bubble", str(result.settings), _spread(row.measured, "share", 0)
        yield f"{name}: step", str(result.settings), _spread(row.step_seconds, "s", -1)


def _experts(result: Imbalance) -> Iterator[tuple[str, str, Figure]]:
    for row in result.rows:
        for name, time in row.contestants.items():
            yield (
                f"{name}, skew {row.skew:g}, {counted(row.ranks, 'rank')}",
                str(result.settings),
                _spread(time, "s", -1),
            )


def _gpu(result: Gpu) -> Iterator[tuple[str, str, Figure]]:
    for proof in result.proofs:
        model = "" if proof.model == "MLP" else f" {proof.model}"
        name = f"{proof.implementation} {proof.strategy}{model}: equal"
        yield name, f"mesh {proof.mesh}, {proof.dtype}", Figure(int(proof.passed), "")
    for part in result.parts:
        for step in part.reached.steps:
            setting = f"batch {step.batch}, width {step.width}, {step.layers} layers, {step.dtype}"
            name = f"{step.framework} {step.implementation}{'' if step.model == 'MLP' else f' {step.model}'}"
            yield f"{name}: step", setting, _spread(step.step_seconds, "s", -1)
            yield f"{name}: share of the rate of matrix products", setting, _once(step.share, "share")


_FIGURES: dict[type[Section], Callable[[Any], Iterator[tuple[str, str, Figure]]]] = {
    Check: _check,
    Diffs: _diff,
    Collectives: _collectives,
    Steps: _steps,
    Bubbles: _bubbles,
    Imbalance: _experts,
    Gpu: _gpu,
}


def _spread(values: Spread, unit: str, better: int) -> Figure:
    return Figure(values.median, unit, (values.q1, values.q3), better)


def _once(value: float, unit: str) -> Figure:
    return Figure(value, unit, (float("-inf"), float("inf")))


def compare(old: Mapping[str, Section], new: Mapping[str, Section]) -> Document:
    """The comparison of two results, name -> section each, as plain JSON types."""
    rows, only = [], {"only_old": [], "only_new": []}
    for section in dict.fromkeys([*old, *new]):
        a, b = (figures(side[section]) if section in side else {} for side in (old, new))
        for (what, setting), figure in a.items():
            if (what, setting) in b:
                place = {"section": section, "figure": what, "setting": setting}
                rows.append({**place, **judged(figure, b[what, setting])})
        for name, ours, theirs in (("only_old", a, b), ("only_new", b, a)):
            only[name] += [f"{section}: {what} ({setting})" for what, setting in ours if (what, setting) not in theirs]
    return {"kind": "comparison", "schema": 1, "origins": origins(old, new), "rows": rows, **only}


def judged(old: Figure, new: Figure) -> Document:
    """Old and new value, their ratio (null over 0), and the flag: null, "slower", "faster", "more" or "less"."""
    outside = old.value != new.value
    if outside and old.spread and new.spread:
        inside = (old.spread[0] <= new.value <= old.spread[1], new.spread[0] <= old.value <= new.spread[1])
        outside = not any(inside)
    grown = new.value > old.value
    words = {0: ("less", "more"), 1: (SLOWER, "faster"), -1: ("faster", SLOWER)}[new.better]
    return {
        "unit": new.unit,
        "old": old.value,
        "new": new.value,
        "ratio": new.value / old.value if old.value else None,
        "flag": words[grown] if outside else None,
    }


def origins(old: Mapping[str, Section], new: Mapping[str, Section]) -> list[str]:
    """How the machines, versions and commits differ, in lines, for each section that both have."""
    lines = []
    for section in (key for key in old if key in new):
        a, b = old[section].machine, new[section].machine
        for fact in ("os", "cpu", "cores", "memory_bytes", "gpus", "python", "commit"):
            was, now = getattr(a, fact), getattr(b, fact)
            if was != now:
                lines.append(f"{fact}: {_short(was)} -> {_short(now)}")
        if (days := [one.date[:10] for one in (a, b)])[0] != days[1]:
            lines.append(f"date: {days[0]} -> {days[1]}")
        for name in dict.fromkeys([*a.versions, *b.versions]):
            was, now = a.versions.get(name), b.versions.get(name)
            if was != now:
                lines.append(f"{name}: {was} -> {now}")
    return list(dict.fromkeys(lines))


def _short(fact: Any) -> str:
    return ", ".join(fact) or "none" if isinstance(fact, list) else str(fact)
