"""The command line: what it refuses and how, what it prints, and its exit status."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
from rich.console import Console

from benchmarks import check, check_view
from contract.axes import ALL_AXES, STRATEGIES, one_axis
from contract.optimizer import OPTIMIZERS
from contract.problem import DTYPES, Problem
from contract.proof import prove
from contract.strategy import DEVICES, IMPLEMENTATIONS
from shardiff.cli import main as cli
from shared_tests.proof.test_proof import ideal

REFUSED = {
    "": "Missing command",
    "nope": "No such command 'nope'",
    "check --nope": "No such option: --nope",
    "check extra": "extra",
    "check --degree": "--degree",
    "check --degree two": "integer",
    "check --degree 1.5": "integer",
    "check --timeout soon": "--timeout",
    "check --timeout 0": "above 0, got 0.0",
    "check --timeout nan": "above 0, got nan",
    "check --timeout inf": "above 0, got inf",
    "check --implementation tensorflow": "unknown implementation 'tensorflow'; known: torch, shard_map, annotated",
    "check --strategy magic": "unknown strategy 'magic'; known: single_device, data_parallel, tensor_parallel, "
    "megatron_tensor_parallel, pipeline_parallel",
    "check --dtype float16": "unknown dtype 'float16'; known: float64, float32, bfloat16",
    "check --dtype float32 --dtype int8": "unknown dtype 'int8'",
    "check --optimizer lion": "unknown optimizer 'lion'; known: sgd, adamw",
    "check --device tpu": "unknown device 'tpu'; known: auto, cpu, cuda",
    "check --degree 0": "degree must be at least 1, got 0",
    "check --steps -1": "steps must be at least 1, got -1",
    "check --batch 0": "batch must be at least 1, got 0",
    "check --microbatches 0": "microbatches must be at least 1, got 0",
    "check --width 10": "width 10, degree 4",
    "check --layers 5 --strategy megatron_tensor_parallel": "even number, got 5",
    "check --layers 3 --strategy pipeline_parallel": "at least 4 layers, got 3",
    "check --batch 3": "at least 4, got 3",
    "check --microbatches 200": "batch of at least 200, got 128",
    "check --strategy single_device --degree 2": "single_device runs on 1 rank, got degree 2",
    "check --device cuda --degree 4096 --width 4096 --batch 4096 --strategy data_parallel": "degree 4096, GPUs",
}
SMALL = ["check", "--width", "8", "--batch", "6", "--steps", "2", "--degree", "2"]
FIELDS = ["implementation", "strategy", "mesh", "dtype", "optimizer", "steps"]
ERRORS = ["loss_error", "grad_error", "grad_norm_error", "param_error"]


def without_frameworks(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, which then must have imported neither framework."""
    code += "\nassert not {'torch', 'jax', 'jaxlib', 'flax', 'optax'} & sys.modules.keys(), 'a framework was imported'"
    code = f"import sys\nfrom shardiff.cli.main import main\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("arguments", "words"), REFUSED.items())
def test_wrong_input_is_refused_in_one_line(arguments, words, capsys):
    assert cli.main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shardiff: ") and err.count("\n") == 1
    assert words in err


def test_wrong_input_with_line_breaks_is_still_refused_in_one_line(capsys):
    assert cli.main(["check", "--strategy", "a\nb"]) == 2
    assert cli.main(["check", "--a\nb"]) == 2
    assert cli.main(["a\nb"]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_wrong_input_is_refused_before_a_framework_is_imported():
    done = without_frameworks(f"for line in {list(REFUSED)!r}: assert main(line.split()) == 2, line")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(REFUSED)


def test_help_names_every_value_and_imports_no_framework():
    done = without_frameworks("assert main(['--help']) == 0 and main(['check', '--help']) == 0")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for name in (*IMPLEMENTATIONS, *ALL_AXES, *DTYPES, *OPTIMIZERS, *DEVICES):
        assert name in done.stdout


def test_version_is_the_distribution_s(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardiff {metadata.version('shardiff')}\n"


def test_the_default_plan_is_the_lecture_s_problem_everywhere():
    runs = check.plan(IMPLEMENTATIONS)
    assert [(run.implementation, run.strategy) for run in runs] == [(i, s) for i in IMPLEMENTATIONS for s in STRATEGIES]
    sizes = {
        (r.world_size, r.problem.batch, r.problem.width, r.problem.layers, r.problem.dtype, r.optimizer) for r in runs
    }
    assert sizes == {(4, 128, 1024, 4, "float32", "adamw")}


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_closed_stream_changes_nothing_but_what_is_seen(closed):
    code = (
        f"import os, sys; [os.close(fd) for fd in {closed}]; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    for arguments, status in (("--version", 0), ("nope", 2)):
        command = [sys.executable, "-c", code, "-m", "shardiff", arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert "Traceback" not in done.stdout + done.stderr


def test_a_plan_has_each_combination_once_and_single_device_on_one_rank():
    runs = check.plan(["torch", "torch"], ["single_device", "data_parallel"], (), ["float32", "float64"], OPTIMIZERS)
    assert len(runs) == 8
    assert {run.strategy: run.world_size for run in runs} == {"single_device": 1, "data_parallel": 4}


def test_json_has_a_row_for_every_run_and_the_machine(ideal_runs, capsys):
    assert cli.main([*SMALL, "--json", "--dtype", "float64", "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == "" and list(document) == ["kind", "schema", "machine", "settings", "rows"]
    assert len(document["rows"]) == len(IMPLEMENTATIONS) * len(STRATEGIES) * 2
    for row in document["rows"]:
        assert list(row) == [*FIELDS, *ERRORS, "passed"]
        assert row["passed"] is True and row["steps"] == 2
        assert all(row[key] == 0 for key in ERRORS)
    assert {row["mesh"] for row in document["rows"]} == {"dp=2", "fsdp=2", "tp=2", "pp=2"}
    assert document["machine"]["versions"]["torch"] == metadata.version("torch")
    assert document["machine"]["cores"] >= 1 and document["machine"]["memory_bytes"] > 0


def test_the_single_device_run_that_bfloat16_is_judged_by_is_made_once_an_implementation(ideal_runs):
    assert cli.main([*SMALL, "--dtype", "bfloat16"]) == 0
    alone = [run.implementation for run in ideal_runs if run.strategy == "single_device"]
    assert sorted(alone) == sorted(IMPLEMENTATIONS)


def test_the_table_has_a_line_for_every_run(ideal_runs, capsys):
    assert cli.main(SMALL) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = [line.split() for line in out.splitlines() if "=2" in line]
    assert [(row[0], row[1]) for row in rows] == [(i, s) for i in IMPLEMENTATIONS for s in STRATEGIES]
    assert {tuple(row[2:]) for row in rows if row[2] == "tp=2"} == {
        ("tp=2", "float32", "adamw", "0.0e+00", "0.0e+00", "0.0e+00", "equal")
    }
    assert f"{len(rows)} of {len(rows)} equal the single-device reference" in out
    assert "batch 6, width 8, 4 layers, 2 steps, float32, adamw; pipeline_parallel in 4 microbatches" in out


@pytest.mark.parametrize(("factor", "shown"), [(1.25, 0.25), (math.nan, None)])
def test_a_row_that_fails_is_named_and_makes_the_status_1(factor, shown, monkeypatch, capsys):
    def execute(run):
        result = ideal(run)
        if run.strategy != "tensor_parallel":
            return result
        return replace(result, losses=result.losses * np.array([1.0, factor]))

    monkeypatch.setattr(check, "executor", lambda runs, timeout, stack: execute)
    arguments = [*SMALL, "--implementation", "annotated"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err == "" and "6 of 7 equal" in out
    assert "annotated tensor_parallel tp=2 float32 adamw: loss: error" in out and "largest in step 1" in out
    assert cli.main([*arguments, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["strategy"] for row in rows if not row["passed"]} == {"tensor_parallel"}
    assert rows[1]["loss_error"] == (shown and pytest.approx(shown))


@pytest.mark.parametrize("columns", [80, 200])
def test_no_cell_of_the_default_table_is_folded(columns):
    runs = check.plan(IMPLEMENTATIONS, degrees=[2], problem=Problem(6, 8, 4))
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(check_view.table([check.Row(run, prove(run, ideal(run), ideal(run))) for run in runs], columns))
    lines = console.export_text().splitlines()
    assert len([line for line in lines if "equal" in line]) == len(runs)
    assert all(any(f" {run.strategy} " in line for line in lines) for run in runs)
    assert max(map(len, lines)) <= columns


def test_an_error_in_a_worker_comes_first_and_makes_the_status_3(monkeypatch, capsys):
    def execute(run):
        if run.strategy == "tensor_parallel":
            raise check.RunFailed(run, "rank 1 of 2 raised", "Traceback of the worker\nRuntimeError: boom\n")
        return ideal(run)

    monkeypatch.setattr(check, "executor", lambda runs, timeout, stack: execute)
    assert cli.main([*SMALL, "--json", "--implementation", "torch"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Traceback of the worker",
        "RuntimeError: boom",
        "shardiff: torch tensor_parallel tp=2 float32 adamw: rank 1 of 2 raised",
    ]
    assert cli.main([*SMALL, "--implementation", "torch"]) == 3
    assert "1 of 1 equal" in capsys.readouterr().out  # what was finished is not lost


def test_an_error_in_the_caller_s_own_process_has_a_traceback_without_the_command_s_frames():
    (run, *_) = check.plan(["annotated"])
    with pytest.raises(check.RunFailed) as failed, check.failing_as(run):
        ideal(replace(run, axes=one_axis(run.strategy, 0)))
    assert str(failed.value) == f"{check.label(run)}: ValueError: degree must be at least 1, got 0"
    assert failed.value.report.rstrip().endswith("ValueError: degree must be at least 1, got 0")
    assert "test_cli.py" in failed.value.report and "check.py" not in failed.value.report


def test_an_interrupt_is_quiet_and_makes_the_status_130(monkeypatch, capsys):
    def execute(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "executor", lambda runs, timeout, stack: execute)
    assert cli.main(SMALL) == 130
    assert capsys.readouterr() == ("", "")
