"""`shardiff bench` from what was measured to what is printed, drawn and returned; results are made up."""

from __future__ import annotations

import json

import pytest

from benchmarks.bubbles import bubbles
from benchmarks.collectives import collectives
from benchmarks.report import run as report_run
from benchmarks.steps import steps
from shardiff.cli import main as cli
from shared_tests.bench.report_documents import piped, stepped, timed

SMALL = ["--width", "16", "--batch", "8", "--layers", "4"]
BENCHES = {
    "steps": (steps, "measure", stepped, ["--ranks", "2", *SMALL], "ddp"),
    "bubbles": (bubbles, "measure", piped, ["--stages", "2", *SMALL], "0.520"),
    "collectives": (collectives, "run", timed, ["--ranks", "2", "--size", "1KiB"], "alpha"),
}


def measuring(monkeypatch: pytest.MonkeyPatch, name: str, **changes) -> list[str]:
    """A bench that measures at once, and its command line."""
    module, function, made, arguments, _ = BENCHES[name]

    def measure(plan, save, starting, *rest):
        starting("the only block")
        save({**made(), "runs": [{"blocks": ["the only block"]}]})
        return {**made(), **changes}

    monkeypatch.setattr(module, function, measure)
    return ["bench", name, *arguments, "--device", "cpu"]


@pytest.mark.parametrize("name", BENCHES)
def test_tables_and_a_picture_or_json_are_what_the_document_says(name, monkeypatch, capsys, tmp_path):
    line, picture, output = measuring(monkeypatch, name), tmp_path / "p.png", tmp_path / "o.json"
    assert cli.main([*line, "--picture", str(picture), "--output", str(output)]) == 0
    assert BENCHES[name][-1] in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(output.read_text())["kind"] == name
    assert cli.main([*line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == BENCHES[name][2]()["rows"]


def test_contestants_that_do_not_train_the_same_have_status_1(monkeypatch, capsys):
    line = measuring(monkeypatch, "steps", failures=["ddp: loss 2.0, torch 1.0"])
    assert cli.main([*line, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failures"] == ["ddp: loss 2.0, torch 1.0"]


def test_a_pipeline_is_written_as_a_trace_with_its_stages(monkeypatch, capsys, tmp_path):
    trace = tmp_path / "t.json"
    assert cli.main([*measuring(monkeypatch, "bubbles"), "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("print('{}'); sys.exit(0)", "{}\n"),
        ("print('[1]'); sys.exit(1)", "[1]\n"),  # it has measured, and something does not hold
        ("sys.exit(3)", report_run.Failed),
        ("sys.exit(130)", KeyboardInterrupt),
    ],
)
def test_a_report_s_command_is_read_by_its_status(code, what, monkeypatch):
    monkeypatch.setattr(report_run, "COMMAND", f"import sys; assert sys.argv[1:] == ['check', '--json']; {code}")
    if isinstance(what, str):
        assert report_run.output("check") == what
    else:
        with pytest.raises(what):
            report_run.output("check")


def test_a_report_s_command_ends_with_the_report(monkeypatch):
    monkeypatch.setattr(report_run, "COMMAND", "import time; time.sleep(60)")
    monkeypatch.setattr(report_run, "PATIENCE", 0.1)
    started = []

    def stop(process):
        started.append(process)
        raise RuntimeError("stopped")

    monkeypatch.setattr(report_run, "wait", stop)
    with pytest.raises(RuntimeError, match="stopped"):
        report_run.output("check")
    assert started[0].returncode is not None


def test_a_benchmark_that_was_interrupted_is_resumed_or_measured_anew_with_other_settings(monkeypatch, tmp_path):
    file, lines = tmp_path / "steps.json", []
    file.write_text(json.dumps({**stepped(), "complete": False}))
    monkeypatch.setattr(report_run, "same_origin", lambda one, other: True)

    def output(line, *rest):
        lines.append((line, *rest))
        if "--resume" in line:
            raise report_run.Failed(f"shardiff {line} ended with status {status}")
        return ""

    monkeypatch.setattr(report_run, "output", output)
    status = 2
    report_run.bench("bench steps", file)
    assert [line.split()[2] for line, _ in lines] == ["--resume", "--output"]
    status = 3
    with pytest.raises(report_run.Failed, match="status 3"):
        report_run.bench("bench steps", file)
