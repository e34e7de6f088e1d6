"""What is said of meshes and links, each as a few configurations to predict and to measure.

The links of the host pairs are a wind tunnel of the H100: a rank's own link is nine times as fast as its part of the
link between hosts, as NVLink's 450 GB/s are of an interface's 50 GB/s. The paced device is so slow that a width of 128
has the ratio of compute to communication that a width of 6,000 has there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.lab.lab import open_lab
from benchmarks.lab.namespaces import Shape
from benchmarks.plan.prove import rivals
from benchmarks.plan.prove.campaign import Campaign, prove
from benchmarks.plan.prove.summary import mesh_of
from contract.problem import Problem

PAIR, HOSTS = Shape(1, 2), Shape(2, 2)
LARGE_BATCH, WIDE, SMALL_BATCH = Problem(1024, 128, 4), Problem(128, 256, 4), Problem(32, 256, 4)
CRITICAL = "The critical ratio"
TUNNEL = Campaign((HOSTS,), (10e6,), iterations=2, inside=45e6)
LINE = Campaign((PAIR,), iterations=2)
RIVALS_AT = (10e6, 50e6)  # bit/s
Document = dict[str, Any]

CLAIMS = (
    replace(
        LINE,
        rates=(10e6,),
        problems=(LARGE_BATCH,),
        meshes=("dp=2", "pp=2", "tp=2"),
        claim="Data parallelism suits slow links where the batch is large",
    ),
    replace(
        LINE,
        rates=(2e6,),
        problems=(WIDE,),
        meshes=("pp=2", "tp=2", "dp=2"),
        claim="A pipeline suits the slowest links where the model is large",
    ),
    replace(LINE, rates=(6.25e6, 12.5e6, 25e6), problems=(WIDE,), meshes=("dp=2",), claim=CRITICAL),
    replace(
        TUNNEL,
        problems=(LARGE_BATCH,),
        meshes=("dp=2,tp=2", "tp=2,dp=2", "pp=2,tp=2", "tp=4"),
        claim="Tensor parallelism wants the fast links",
    ),
    replace(
        TUNNEL,
        problems=(SMALL_BATCH,),
        meshes=("tp=2,dp=2", "dp=2,tp=2"),
        claim="The exception: with a small batch and a wide model, tensor parallelism crosses hosts",
    ),
)


def prove_claims(save: Callable[[Document], object], starting: Callable[[str], object]) -> Document:
    """The document of all claims, and of the rivals on a slow link."""
    document = prove(CLAIMS, save, starting) | {"rivals": []}
    with open_lab(PAIR) as lab:
        for rate in RIVALS_AT:
            starting(f"{PAIR}, {rate / 1e6:g} Mbit/s: torch's own, and gradients summed by messages")
            assert LINE.paced is not None
            document["rivals"] += rivals.measure(lab, rate, WIDE, LINE.paced, LINE.iterations)
    save(document)
    return document


def table(document: Document) -> list[str]:
    """Lines of Markdown: every claim with what was predicted and measured, and then the critical ratio."""
    lines = [
        "| claim | ranks, links | batch x width | mesh | step, predicted | measured | waits, predicted | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    entries = [one for one in document["configurations"] if one["measured"]]
    told = ""
    for one in entries:
        if one["claim"] == CRITICAL:
            continue
        lines.append(
            f"| {one['claim'] if one['claim'] != told else ''} | {links_of(one)} | {one['batch']} x {one['width']} | "
            f"`{mesh_of(one)}` | {one['predicted']['seconds']:.2f} s | {one['measured']['seconds']:.2f} s | "
            f"{waits(one, 'predicted'):.2f} s | {waits(one, 'measured'):.2f} s |"
        )
        told = one["claim"]
    return [*lines, "", *critical([one for one in entries if one["claim"] == CRITICAL], document)]


def critical(entries: Sequence[Document], document: Document) -> list[str]:
    """Waiting over the backward pass, which could hide it: in closed form, simulated and measured."""
    lines = ["| C / W over B / X | simulated | measured |", "|---|---|---|"]
    flops = document["settings"]["paced"]["flops"]
    for one in entries:
        of_link, ranks = flops / (one["rate_bits_per_second"] / 8), 2
        backward = one["predicted"]["compute"] * (2 * one["layers"] - 1) / (3 * one["layers"] - 1)
        found = (waits(one, kind) / backward for kind in ("predicted", "measured"))
        lines.append(
            f"| {of_link / (one['batch'] / ranks):.2f} | " + " | ".join(f"{each:.2f}" for each in found) + " |"
        )
    return lines


def waits(one: Document, kind: str) -> float:
    """Seconds of a step in which nothing is computed."""
    predicted = one["predicted"]
    return one[kind]["seconds"] - predicted["compute"] - predicted["update"] - predicted["overhead"]


def links_of(one: Document) -> str:
    """`2x2, 45 and 10 Mbit/s`"""
    inside = one.get("inside_bits_per_second")
    rates = f"{one['rate_bits_per_second'] / 1e6:g} Mbit/s"
    return f"{one['shape']}, {f'{inside / 1e6:g} and ' if inside else ''}{rates}"
