"""What `shardiff hlo` and `shardiff targets` print, a record in a line, and machines about which facts are missing."""

from __future__ import annotations

import io
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import diff_strategies as diff
from benchmarks import diff_view
from benchmarks.documents.results_io import parse_as
from benchmarks.documents.steps import Steps
from benchmarks.steps import view as steps_view
from contract import cost
from contract.axes import one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.cli import main as cli
from shardiff.compiling.hardware import FAMILIES
from shardiff.diff import record_view
from shardiff.hlo import read_file
from shardiff.record import Executions, Record, record, totals
from shardiff.system import machine, words
from shared_tests.bench import report_documents

CASES = Path(__file__).parents[1] / "tool" / "hlo_cases"
ONE, OTHER = CASES / "all_reduce_listed_groups.hlo.txt", CASES / "all_reduce_start_done.hlo.txt"


def test_hlo_prints_a_line_of_json_for_each_file_that_can_be_read_and_names_the_other(capsys):
    assert cli.main(["hlo", "--json", str(ONE), str(CASES / "bad_empty.hlo.txt"), str(OTHER)]) == 2
    out, err = capsys.readouterr()
    documents = [json.loads(line) for line in out.splitlines()]
    assert err.startswith("shardiff: ") and "bad_empty.hlo.txt" in err and err.count("\n") == 1
    for file, document in zip((ONE, OTHER), documents, strict=True):
        module = read_file(file)
        assert (document["file"], document["module"]) == (str(file), module.name)
        assert (document["num_devices"], document["totals"]) == (module.num_devices, totals(module.records))
        assert [Record.from_json(fields) for fields in document["records"]] == module.records


def test_hlo_shows_a_table(capsys):
    module = read_file(ONE)
    assert cli.main(["hlo", str(ONE)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith(f"{ONE}: module {module.name}, {module.num_devices} devices\n")
    assert all(f" {one.op} " in out and words.size(one.payload_bytes) in out for one in module.records)
    assert out.endswith(f"{record_view.summary(module.records)}\n")


def test_targets_has_a_line_for_every_family_with_its_memory(capsys):
    assert cli.main(["targets"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.split()[:1] and line.split()[0] in FAMILIES}
    assert list(lines) == list(FAMILIES)
    for name, family in FAMILIES.items():
        assert all(example in lines[name] for example in family.examples)
        assert not family.memory or words.size(family.memory) in lines[name]
        assert "installed" in lines[name] or 'pip install "shardiff[compilers]"' in lines[name]


def test_sizes_have_three_digits_and_a_unit():
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        1_050_000: "1.05 MB",
        999_600: "1 MB",
        4e9: "4 GB",
        12e15: "1.2e+04 TB",
    }
    assert {count: words.size(count) for count in sizes} == sizes


def test_how_often_among_whom_and_where_in_a_few_characters():
    def one(op="all_reduce", times=(1, 1), **rest):
        return record(op, "float32", 64, rest.pop("n", 4), executions=Executions(*times), **rest)

    assert [record_view.times(one(times=t)) for t in ((7, 7), (0, 1), (2, None))] == ["7", "0..1", "2.."]
    permute = one("collective_permute", n=None, edges=tuple((i, i + 1) for i in range(6)))
    groups = one(n=2, groups=((0, 1), (2, 3)), axis="tp")
    assert [record_view.group(r) for r in (one(), groups, permute)] == ["4", "tp 2 of 2", "0>1 1>2 2>3 3>4 +2"]
    strided = tuple(tuple(range(i, 32, 4)) for i in range(4))
    unnamed = [one(n=len(g[0]), groups=g) for g in (((0, 1), (2, 3)), ((0, 2), (1, 3)), strided)]
    assert [record_view.group(r) for r in unnamed] == [
        "2 of 2: 0,1 2,3",
        "2 of 2: 0,2 1,3",
        "4 of 8: 0,4,...,28 1,5,...,29 ... 2 more",
    ]
    below = os.path.join(os.getcwd(), "a", "b.py:3")
    assert [record_view.place(p) for p in (None, below, "/x/y/z/a/b.py:3")] == ["", "a/b.py:3", "z/a/b.py:3"]
    assert record_view.summary([]) == "no communication"
    assert (
        record_view.summary([one(times=(1, 3))])
        == "in one step: 1 to 3 calls, payload 64 B to 192 B, a rank sends 96 B to 288 B"
    )
    assert (
        record_view.summary([one(times=(1, None))])
        == "in one step: 1 or more calls, payload 64 B or more, a rank sends 96 B or more"
    )


def test_facts_that_a_machine_lacks_are_empty_and_never_an_error(monkeypatch, tmp_path):
    def absent(*_, **__):
        raise OSError("no such file")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", absent)
        assert machine.cpu_model()  # by another way
    monkeypatch.setenv("PATH", str(tmp_path))  # neither nvidia-smi nor git
    assert (machine.gpus(), machine.commit()) == ([], None)
    assert machine.num_gpus() == len([*Path("/dev").glob("nvidia[0-9]*")])
    assert machine.version("no-such-distribution") is None
    assert set(machine.facts()) == {
        "os",
        "cpu",
        "cores",
        "memory_bytes",
        "gpus",
        "python",
        "versions",
        "commit",
        "date",
    }


@pytest.mark.parametrize("body", ["exit 1", "printf 'One GPU, 1 MiB\\nOther GPU, 2 MiB\\n'"])
def test_gpus_are_what_nvidia_smi_lists(body, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.gpus() == ([] if "exit" in body else ["One GPU, 1 MiB", "Other GPU, 2 MiB"])
    assert machine.num_gpus() >= len(machine.gpus())


def test_a_commit_with_changes_is_marked(monkeypatch, tmp_path):
    def git(*arguments):
        named = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *named, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(machine, "__file__", str(tmp_path / "shardiff" / "system" / "machine.py"))
    git("init", "--quiet")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "--quiet", "-m", "a")
    clean = machine.commit()
    (tmp_path / "a").write_text("2")
    assert clean and len(clean) == 40 and machine.commit() == f"{clean}+"


def test_the_table_of_a_diff_has_its_rows_totals_rules_and_what_the_device_does(monkeypatch, capsys, tmp_path):
    def compute(pairs, precision, told, timeout):
        found = []
        for run, target in pairs:
            written = cost.communication(replace(run, implementation="torch"))
            told(f"{run.strategy} for {target}")
            memory, traced = {"arguments": 5_000_000}, run.world_size <= diff.MOST_TRACED
            found.append(diff.compare(run, str(target), written, written[1:], traced, memory))
        return found

    monkeypatch.setattr(diff, "compute", compute)
    picture = tmp_path / "p.png"
    arguments = ["data_parallel", "tensor_parallel", "--width", "64", "--picture", str(picture)]
    assert cli.main(["diff", *arguments, "--target", "cpu:4", "--target", "v5e:8x4"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 140
    assert out.count("only written") >= 4 and out.count("memory of a device: arguments 5 MB") == 4
    assert out.count("written, traced") == 2 and out.count("too many ranks to run here") == 2
    assert "tensor_parallel, annotated, for v5e:8x4 (tp=32): batch 128, width 64, 4 layers, float32" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p_data_parallel.png", "p_tensor_parallel.png"]
    assert cli.main(["diff", "tensor_parallel", "--width", "64", "--fail-on", "unexplained"]) == 1


def test_what_a_device_computes_and_moves_is_told_where_there_is_any():
    run = Run("annotated", one_axis("data_parallel", 2), Problem(8, 16, 2))
    records = cost.communication(run.in_torch)
    one = diff.compare(run, "cpu:2", records, records)
    counts = {"product": 5, "products": 5, "flops": 2e9, "transposes": 1, "transposed_bytes": 64, "copies": 0}
    assert diff_view.work(replace(one, work={})) == ""
    assert (
        diff_view.work(replace(one, work={**counts, "copied_bytes": 0}))
        == "\nwork of a device: 5 products of 2 GFLOP, 1 transpose of 64 B"
    )


def test_one_call_is_not_told_as_several():
    one = record_view.summary([record("all_reduce", "float32", 64, 4)])
    assert one == "in one step: 1 call, payload 64 B, a rank sends 96 B"


def test_no_name_in_the_table_of_steps_on_a_mesh_is_cut_off():
    document = report_documents.stepped()
    for row in (*document["rows"], *document["ratios"]):
        row |= {"strategy": "data_parallel x pipeline_parallel x megatron_tensor_parallel", "mesh": "dp=2,pp=2,tp=2"}
    console = Console(width=120, record=True, file=io.StringIO())
    for part in steps_view.parts(parse_as(Steps, document)):
        console.print(part)
    text = console.export_text()
    assert (
        "\u2026" not in text
        and text.count("megatron_tensor_parallel") > 1
        and text.count("dp=2") > 1 < text.count("tp=2")
    )
