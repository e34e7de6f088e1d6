"""`shardiff trace` in every format, with budgets and a baseline; a large program is shown as a summary."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardiff import baseline
from shardiff.cli import main as cli
from shardiff.program import Program
from shardiff.record import Record, record, totals
from shardiff.summary import by_rank, summarize
from shardiff.tracing import traced
from shardiff.tracing.calls import Call
from shardiff.tracing.script import Launch, Watch

FIELDS: dict[str, Any] = {"dtype": "float32", "group": "0", "ranks": (0, 1), "source": "train.py:7"}


def layer(rank: int, i: int, time: float) -> list[Call]:
    fields = FIELDS | {"payload_bytes": 4096, "phase": "backward", "detail": f"gradient of layers.{i}.w", "time": time}
    return [
        Call(rank, "all_reduce", is_async=True, axis="dp", **fields),
        Call(rank, "wait", of=2 * i, time=time + 0.5),
    ]


CALLS = [call for rank in (0, 1) for i in range(50) for call in layer(rank, i, 100.0 + i)]
CALLS += [Call(rank, "broadcast", payload_bytes=8, peer=0, phase="other", time=200.0, **FIELDS) for rank in (0, 1)]


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of running a script: CALLS, and status 0."""

    def run(launch: Launch, watch: Watch) -> tuple[int, None]:
        Path(launch.settings.directory, "1.jsonl").write_text("".join(json.dumps(c.to_json()) + "\n" for c in CALLS))
        return 0, None

    monkeypatch.setattr(traced, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import jax\n")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert cli.main(["trace", "--nproc", "2", *arguments, "train.py"]) == status
    return capsys.readouterr().out


def test_a_large_program_is_a_summary_and_its_details_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    assert "gradient of layers.*.w" in text and "51 records; --all shows each" in text and "layers.7" not in text
    assert "51 calls, 205 kB payload, 205 kB that a rank must send" in text
    assert "layers.7.w" in shown(capsys, "--all")


def test_every_format_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, "--format", "json"))
    records = [Record.from_json(fields) for fields in document["records"]]
    assert document["totals"] == totals(records) and len(records) == 51
    assert document["busiest_rank"] == {"rank": 0, "calls": 51, "payload_bytes": 204808, "wire_bytes": 204808}
    assert json.loads(shown(capsys, "--json")) == document
    rows = list(csv.DictReader(io.StringIO(shown(capsys, "--format", "csv"))))
    assert sum(int(row["payload_bytes"]) * int(row["calls"]) for row in rows) == 204808
    assert rows[0]["groups"] == "0 1" and rows[0]["detail"] == "gradient of layers.0.w"
    table = shown(capsys, "--format", "markdown")
    assert table.count("| backward | all_reduce | 1 | 4.1 kB |") == 50
    events = json.loads(shown(capsys, "--format", "perfetto"))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 100 and {event["dur"] for event in spans} == {5e5} and {e["pid"] for e in spans} == {0, 1}
    assert "::notice::train.py, ranks 0, 1: 51 calls" in shown(capsys, "--format", "github")
    suite = ElementTree.fromstring(shown(capsys, "--format", "junit"))
    assert (suite.get("tests"), suite.get("failures")) == ("3", "0")


def test_a_budget_that_is_exceeded_fails_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    over = ("--fail-on", "dp wire > 200kB", "--fail-on", "all_reduce > 1MB")
    line = "over budget: dp wire > 200kB: 205 kB"
    assert line in shown(capsys, *over, status=1)
    assert json.loads(shown(capsys, *over, "--json", status=1))["disagreements"] == [line]
    assert f"::error::{line}" in shown(capsys, *over, "--format", "github", status=1)
    suite = ElementTree.fromstring(shown(capsys, *over, "--format", "junit", status=1))
    assert [case.get("name") for case in suite if len(case)] == ["budgets"]


def test_a_baseline_is_written_and_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(capsys, "--baseline", "base.json", "--update-baseline")
    shown(capsys, "--baseline", "base.json")
    [(name, program)] = baseline.read(Path("base.json")).items()
    assert name == "train.py"
    baseline.write(Path("base.json"), {name: replace(program, records=program.records[1:])})
    line = "more than the baseline: backward all_reduce over dp: 50 calls, 205 kB payload; it had 49 calls, 201 kB"
    assert line in shown(capsys, "--baseline", "base.json", status=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "yaml"], "unknown format 'yaml'; known: table, json, csv"),
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--fail-on", "all_gather"], "'all_gather' is no budget: write WORDS > SIZE"),
        (["--baseline", "absent.json"], "absent.json: no such baseline; write it with --update-baseline"),
        (["--baseline", "other.json"], "other.json: has nothing for train.py; write it with --update-baseline"),
        (["--update-baseline"], "--update-baseline needs --baseline FILE.json"),
        (["--baseline", "train.py"], "train.py: not JSON"),
        (["-m", "./train.py"], "'./train.py' is no name of a module"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    baseline.write(Path("other.json"), {"other.py": Program(())})
    assert cli.main(["trace", *arguments, "train.py"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


def test_a_script_that_uses_jax_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "run", lambda launch, watch: (0, None))
    assert "shardiff compile train.py:step --target cpu:8" in shown(capsys)


def test_what_the_busiest_rank_sends_is_no_sum_over_ranks_that_do_different_things() -> None:
    stages = [record("collective_permute", "float32", 100, None, edges=((i, i + 1),)) for i in range(3)]
    groups = [record("all_reduce", "float32", size, 2, groups=(ranks,)) for ranks, size in (((0, 1), 40), ((2, 3), 80))]
    assert [share.wire_bytes for share in by_rank([*stages, *groups])] == [140, 140, 180, 80]
    summary = summarize([*stages, *groups])
    assert summary.busiest and summary.idlest and (summary.busiest.rank, summary.idlest.rank) == (2, 3)
    unknown = record("all_reduce", "float32", 4, 2)
    assert by_rank([unknown]) == [] and summarize([unknown]).busiest is None
    assert sum(each.payload_bytes for each in summarize([*stages, *groups, unknown]).sums) == 424, "they add up"
