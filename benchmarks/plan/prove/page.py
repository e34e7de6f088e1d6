"""The tables of docs/plan.md, from the newest results of each kind: `python -m benchmarks.plan.prove.page`.

A block of the page stands between `<!-- NAME -->` and `<!-- end of NAME -->`; what is written outside of them stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.documents import kept
from benchmarks.plan.prove import claims, rivals
from benchmarks.plan.prove.summary import WITHIN, groups, mesh_of, summary
from benchmarks.words import binary_size, counted
from shardiff.system import machine

PAGE = kept.ROOT / "docs" / "plan.md"
NEAR = 0.10  # of the predicted rate, for a crossover to be where it was predicted
STEEP = 0.3  # change of the ratio of two times over that of the rate: a crossover that 3 % of time move by 10 %
Document = dict[str, Any]


def newest(kind: str) -> tuple[str, Document] | None:
    """The name and content of the newest results of a kind: plan_paced, plan_real, plan_claims or wire."""
    found = kept.newest(kind)
    return (found.name, json.loads(found.read_text())) if found else None


def blocks() -> dict[str, list[str]]:
    """Name -> lines of Markdown, for all results that there are."""
    made: dict[str, list[str]] = {}
    paced, real, said = map(newest, ("plan_paced", "plan_real", "plan_claims"))
    if paced and real:
        made["proof"] = [*about(*paced), "", *table(paced[1], real[1]), "", *crossed(paced[1])]
        made["choices"] = [*chosen(paced[1]["configurations"])]
    if said:
        done = said[1]["configurations"]
        calm = sum(not one["measured"]["kept_flagged"] for one in done)
        file = f"[Results](../benchmarks/results/{said[0]})"
        made["claims"] = [f"{file}; {calm} of {len(done)} with undisturbed samples:", "", *claims.table(said[1])]
        made["rivals"] = rivals.table(said[1]["rivals"])
    if wire := newest("wire"):
        made["wire"] = [*of_wire(*wire)]
    return made


def about(name: str, document: Document) -> Iterator[str]:
    """Where, and what of."""
    done = document["configurations"]
    paced, rates = document["settings"]["paced"], sorted({one["rate_bits_per_second"] for one in done})
    sizes = dict.fromkeys(f"{one['batch']} x {one['width']}" for one in done)
    yield f"On {machine.summary(document['machine'])}"
    yield f"([results](../benchmarks/results/{name})): {counted(len(done), 'paced configuration')}, which are every"
    yield f"mesh of dp, fsdp, tp and pp on 2 and 4 ranks, at {listed(f'{rate / 1e6:g}' for rate in rates)} Mbit/s,"
    yield f"batch x width {listed(sizes)}, on devices of {paced['flops'] / 1e9:g} GFLOP/s."


def listed(words: Any) -> str:
    """`a, b and c`"""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def table(paced: Document, real: Document) -> Iterator[str]:
    """One line for each shape, for all of them, and for real compute."""
    yield (
        "| samples | simulation: median, 90th percentile | undisturbed: number, median, 90th percentile | "
        "max(compute, communication): median | right choices, both |"
    )
    yield "|---|---|---|---|---|"
    entries = paced["configurations"]
    for shape in dict.fromkeys(one["shape"] for one in entries):
        yield line(shape, [one for one in entries if one["shape"] == shape])
    yield line("all", entries)
    yield line("1x2, real compute", real["configurations"])


def line(name: str, entries: list[Document]) -> str:
    """The errors of these configurations."""
    found = summary(entries)
    assert found is not None
    error, calm, naive = (
        found[key] for key in ("simulation", "simulation_undisturbed", "max_of_compute_and_communication")
    )
    chosen, others = found["choices"], found["choices_by_max"]
    undisturbed = f"{found['undisturbed']}, {percent(calm['median'])}, {percent(calm['p90'])}" if calm else "0"
    return (
        f"| {name}: {found['configurations']} | {percent(error['median'])}, {percent(error['p90'])} | {undisturbed} | "
        f"{percent(naive['median'])} | {chosen['right']} and {others['right']} of {chosen['of']} |"
    )


def crossed(document: Document) -> Iterator[str]:
    """How near the crossovers were, and memory."""
    found = summary(document["configurations"])
    assert found is not None
    crossings, off = found["crossovers"], percent(NEAR, 0)
    near = [
        one for one in crossings if abs(one["predicted_bits_per_second"] / one["measured_bits_per_second"] - 1) <= NEAR
    ]
    yield f"{len(near)} of {counted(len(crossings), 'crossover')} were measured within {off} of the predicted rate."
    if crossings:
        steep = [one for one in crossings if one["steep"] >= STEEP]
        by = percent(NEAR * STEEP, 0)
        apart = percent(median(one["apart"] for one in crossings))
        both = sum(one in near for one in steep)
        yield f"{both} of these are among the {len(steep)} where {off} of the rate change the"
        yield f"ratio of the two times by {by} or more. At the predicted rate, the measured times of the two meshes"
        yield f"differ by {apart} in the median."
    yield f"Memory was predicted with an error of at most {percent(found['memory']['largest'], 2)}."


def chosen(entries: list[Document]) -> Iterator[str]:
    """One line for each choice: the three meshes that were predicted to be the fastest, and the fastest one."""
    yield "| ranks, Mbit/s, batch x width | first | second | third | fastest | |"
    yield "|---|---|---|---|---|---|"
    for those in groups(entries, "shape", "rate_bits_per_second", "batch", "width"):
        ranked = sorted(those, key=lambda one: one["predicted"]["seconds"])
        fastest = min(those, key=lambda one: one["measured"]["seconds"])
        over = ranked[0]["measured"]["seconds"] / fastest["measured"]["seconds"] - 1
        case = "{shape}, {rate:g}, {batch} x {width}".format(rate=those[0]["rate_bits_per_second"] / 1e6, **those[0])
        cells = [f"`{mesh_of(one)}` {seconds(one)}" for one in (*ranked[:3], fastest)]
        yield f"| {case} | {' | '.join(cells)} | {'right' if over <= WITHIN else f'{percent(over)} slower'} |"


def seconds(one: Document) -> str:
    """A step as predicted and as measured; * where every sample was disturbed."""
    times = f"{one['predicted']['seconds']:.2f}, {one['measured']['seconds']:.2f}"
    return f"{times}*" if one["measured"]["kept_flagged"] else times


def of_wire(name: str, document: Document) -> Iterator[str]:
    """One line for each collective, with the numbers of all ranks."""
    rate, counts = document["settings"]["bits_per_second"], dict.fromkeys(one["ranks"] for one in document["rows"])
    yield f"Links of {rate / 1e6:g} Mbit/s, {binary_size(document['rows'][0]['bytes'])}"
    yield f"([results](../benchmarks/results/{name})), on {listed(map(str, counts))} ranks:"
    yield from ("", "| op | of | bytes over optimal | time over optimal |", "|---|---|---|---|")
    for key in dict.fromkeys((one["op"], one["framework"]) for one in document["rows"]):
        rows = [one for one in document["rows"] if (one["op"], one["framework"]) == key]
        bytes_, seconds = (
            ", ".join(f"{one[of]:.2f}" for one in rows) for of in ("bytes_over_optimal", "seconds_over_optimal")
        )
        yield f"| {key[0]} | {key[1]} | {bytes_} | {seconds} |"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def filled(text: str, made: dict[str, list[str]]) -> str:
    """The page with these blocks. Raises ValueError for a block that it has no place for."""
    for name, lines in made.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE.name} has no block {name}")
        text = pattern.sub(lambda _, lines=lines: start + "\n".join(lines) + f"\n{end}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), blocks()))
