"""A proof for people: every configuration with its prediction, and how good the predictions were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks import terminal
from benchmarks.plan.prove.summary import mesh_of
from benchmarks.words import counted, duration
from shardiff.system import machine

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def parts(document: dict[str, Any]) -> Iterator[RenderableType]:
    """All that is printed."""
    done = [one for one in document["configurations"] if one["measured"]]
    if done:
        yield table(done)
    if (found := document["summary"]) is not None:
        yield from judged(found)
    yield machine.summary(document["machine"])


def table(done: list[dict[str, Any]]) -> Table:
    """One line for each configuration."""
    made = terminal.table(
        ["ranks", "rate", "mesh", "batch x width"], ["predicted", "measured", "error", "max()", "flagged"], gap=2
    )
    for one in done:
        predicted, measured = one["predicted"], one["measured"]
        made.add_row(
            one["shape"],
            f"{one['rate_bits_per_second'] / 1e6:g} Mbit/s",
            mesh_of(one),
            f"{one['batch']} x {one['width']}",
            duration(predicted["seconds"]),
            duration(measured["seconds"]),
            f"{100 * (predicted['seconds'] / measured['seconds'] - 1):+.1f} %",
            duration(predicted["max_of_compute_and_communication"]),
            str(measured["flagged"]),
        )
    return made


def judged(found: dict[str, Any]) -> Iterator[str]:
    """The errors in words."""
    for name, what in (("simulation", "simulation"), ("max_of_compute_and_communication", "max(compute, comm)")):
        error, choice = found[name], found["choices" if name == "simulation" else "choices_by_max"]
        yield (
            f"{what}: median error {100 * error['median']:.1f} %, 90th percentile {100 * error['p90']:.1f} %, largest "
            f"{100 * error['largest']:.1f} % over {counted(found['configurations'], 'configuration')}; the mesh that "
            f"it ranks first is the fastest or within 5 % of it in {choice['right']} of {choice['of']}"
        )
    if (calm := found["simulation_undisturbed"]) and found["undisturbed"] < found["configurations"]:
        yield (
            f"of these, {counted(found['undisturbed'], 'configuration')} had a sample in which no rank waited for a "
            f"core: median error {100 * calm['median']:.1f} %, 90th percentile {100 * calm['p90']:.1f} %"
        )
    memory = found["memory"]
    yield f"memory: median error {100 * memory['median']:.2f} %, largest {100 * memory['largest']:.2f} %"
    for one in found["crossovers"]:
        predicted, measured = one["predicted_bits_per_second"], one["measured_bits_per_second"]
        yield (
            f"crossover of {one['meshes'][0]} and {one['meshes'][1]} on {one['shape']}, batch {one['batch']}: "
            f"predicted {predicted / 1e6:.1f}, measured {measured / 1e6:.1f} Mbit/s "
            f"({100 * (predicted / measured - 1):+.1f} %)"
        )
    yield f"{counted(found['samples_flagged'], 'sample')} flagged, because a rank had to wait for a core, and repeated"
