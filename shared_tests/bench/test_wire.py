"""`shardiff bench collectives --wire` without namespaces: its rows, its table, and what it refuses."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from benchmarks.collectives import wire
from benchmarks.lab import lab
from benchmarks.lab.namespaces import GOODPUT
from shardiff.cli import main as cli

WIRE = ["bench", "collectives", "--wire", "--ranks", "2", "--max", "1MiB"]
MIB = 2**20


class Lab:
    """A lab whose ranks have sent the optimal bytes of an all_reduce, in 0.1 s and 0.2 s."""

    def rates(self, inside: float, between: None) -> None:
        assert inside == wire.RATE

    def call(self, module: str, name: str, op: str, size: int, iterations: int, *ranks: int):
        assert (name, size, iterations) == ("collective", MIB, 5)
        assert (module, ranks) in ((wire.TRAFFIC, (2,)), (wire.OF_JAX, ()))
        return [([0.1, 0.1], round(MIB / GOODPUT)), ([0.2, 0.1], MIB // 2)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def open_lab(shape):
        assert (shape.hosts, shape.devices) == (1, 2)
        yield Lab()

    monkeypatch.setattr(lab, "refusal", lambda: None)
    monkeypatch.setattr(wire, "open_lab", open_lab)


def test_a_row_has_the_busiest_rank_and_the_slowest_beside_the_optimum():
    made = wire.row("reduce_scatter by messages", 2, MIB, [([0.1, 0.3], 100), ([0.2, 0.1], MIB)])
    assert made["optimal_bytes"] == MIB // 2 and made["seconds"] == 0.25  # of the ranks the slower, of the calls
    assert made["bytes_over_optimal"] == pytest.approx(2 * GOODPUT)
    assert made["seconds_over_optimal"] == pytest.approx(0.25 / (MIB / 2 / (wire.RATE / 8 * GOODPUT)))


def test_the_table_has_the_library_s_collective_and_the_other_ways_to_the_same_values(opened, capsys, tmp_path):
    file = tmp_path / "wire.json"
    assert cli.main([*WIRE, "--op", "all_reduce", "--op", "reduce_scatter", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith(" all_reduce ") and "torch" in line)
    assert line.split() == "all_reduce torch 2 1 MiB 1,048,576 1,056,310 1.00 150 ms 3.55".split()
    assert "links of 200 Mbit/s" in out
    document = json.loads(file.read_text())
    assert (document["kind"], document["schema"], document["settings"]["iterations"]) == ("wire", 1, 5)
    assert [(row["framework"], row["op"]) for row in document["rows"]] == [
        ("torch", "all_reduce"),
        ("torch", "reduce_scatter"),
        ("torch", "reduce_scatter by all_to_all"),
        ("torch", "reduce_scatter by messages"),
        ("jax", "all_reduce"),
        ("jax", "reduce_scatter"),
    ]


def test_a_lab_that_fails_is_told_with_status_3(opened, monkeypatch, capsys):
    def fail(*_):
        raise lab.LabError("rank 1 has ended in collective")

    monkeypatch.setattr(Lab, "call", fail)
    assert cli.main([*WIRE, "--json"]) == 3
    assert capsys.readouterr() == ("", "shardiff: rank 1 has ended in collective\n")


@pytest.mark.parametrize(
    ("arguments", "flaw", "said"),
    [
        ([], "ip is missing; install iproute2", "--wire: ip is missing; install iproute2"),
        (["--ranks", "1"], None, "--wire needs 2 ranks or more"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_a_line(arguments, flaw, said, monkeypatch, capsys):
    monkeypatch.setattr(lab, "refusal", lambda: flaw)
    assert cli.main([*WIRE, *arguments]) == 2
    assert capsys.readouterr() == ("", f"shardiff: {said}\n")
