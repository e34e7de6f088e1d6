"""The two programs that time the reader and the diff do what they say. No timing."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

from benchmarks import diff as diff_command
from benchmarks.speed import diff_speed, hlo_speed
from contract.axes import CORE
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
