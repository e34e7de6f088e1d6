"""The programs that time the reader, the diff and the tracer do what they say. No timing."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from itertools import product

from benchmarks import diff as diff_command
from benchmarks.speed import diff_speed, hlo_speed, trace_speed
from contract.axes import CORE
from contract.problem import Problem
from shardiff.cli import main as cli
from shardiff.hlo import read, read_file


def test_the_text_that_the_reader_is_timed_on_is_the_real_dumps_over_and_over():
    found = [len(read_file(path).records) for path in sorted(hlo_speed.DUMPS.glob("*.hlo.txt"))]
    size = sum(path.stat().st_size for path in hlo_speed.DUMPS.glob("*.hlo.txt")) / 1e6
    text = hlo_speed.synthetic(0.95 * size)  # so that the last copy is begun, and no further one
    assert len(read(text).records) == sum(found) and text.count("call(), to_apply=") == len(found)


def test_the_reader_is_timed_in_a_process_of_its_own(capfd):
    subprocess.run([sys.executable, "-m", "benchmarks.speed.hlo_speed", "0.1"], check=True, timeout=60)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["collectives", "time", "file"]
    assert " MB/s by the clock, " in lines[1] and lines[2].startswith("peak memory ")


def test_the_diff_is_timed_over_every_strategy_and_a_large_slice(monkeypatch, capsys):
    commands, planned = [], []
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", lambda command, **rest: commands.append((command, rest)))
        diff_speed.main()
    assert capsys.readouterr().out.count(" s (goal: ") == 2
    assert all(rest["check"] for _, rest in commands)
    monkeypatch.setattr(diff_command, "answer_diff", lambda pairs, *rest: planned.extend(pairs) or 0)
    for command, _ in commands:
        assert command[1:3] == ["-m", "shardiff"] and cli.main(command[3:]) == 0
    found = {(run.strategy, str(target)) for run, target in planned}
    assert found == {*product(CORE, diff_speed.TARGETS), ("data_parallel", "v5p:8x8x16")}


def test_steps_with_and_without_a_trace_take_turns_on_the_same_ranks(pool, monkeypatch, capsys):
    started = []

    @contextmanager
    def workers(ranks, device, timeout):
        started.append(ranks)
        yield pool

    monkeypatch.setattr(trace_speed, "workers", workers)
    monkeypatch.setattr(trace_speed, "Problem", partial(Problem, 8, 16, 4))
    monkeypatch.setattr(trace_speed, "operators", partial(trace_speed.operators, 20))
    monkeypatch.setattr(sys, "argv", ["trace_speed", "2"])
    trace_speed.main()
    *of_steps, of_operators = capsys.readouterr().out.splitlines()
    found = [(line.partition(" on ")[0], line.partition(" on ")[2].partition(":")[0]) for line in of_steps]
    ranks = [f"{n} ranks, {clock}" for n in started for clock in trace_speed.CLOCKS]
    assert started == [2, 4]
    assert sorted(found) == sorted(product(trace_speed.STRATEGIES, ranks))
    assert all(line.endswith(" more with a trace (goal: 15%)") for line in of_steps)
    assert of_operators.startswith("an operator: ") and of_operators.endswith(" us")
