"""`shardiff report A B`: how two results are compared, which files are refused, and how results are written."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.documents import results_io
from benchmarks.report import compare as report_compare
from benchmarks.report import compare_view
from shardiff.cli import main as cli
from shardiff.system import files
from shared_tests.bench.report_documents import MACHINE, everything, spread, stepped


@pytest.mark.parametrize(
    ("old", "new", "ratio", "flag"),
    [
        ((10, (9, 11)), (12, (11.5, 13)), 1.2, "slower"),
        ((10, (9, 11)), (8, (7, 8.5)), 0.8, "faster"),
        ((10, (9, 13)), (12, (11.5, 13)), 1.2, None),  # new within the old spread
        ((10, (9, 11)), (12, (9.5, 13)), 1.2, None),  # old within the new one
        ((10, (9, 11)), (10, (9, 11)), 1.0, None),
        ((0, (0, 0)), (1, (1, 1)), None, "slower"),
    ],
)
def test_a_figure_is_flagged_outside_of_both_spreads(old, new, ratio, flag):
    judged = report_compare.judged(*(report_compare.Figure(value, "s", spread, -1) for value, spread in (old, new)))
    assert (judged["ratio"], judged["flag"]) == (ratio, flag)


def test_bandwidths_are_better_if_higher_and_exact_figures_differ_by_one():
    def flag(a, b, **more):
        return report_compare.judged(*(report_compare.Figure(value, "", **more) for value in (a, b)))["flag"]

    assert flag(1, 2, spread=None) == "more" and flag(2, 1) == "less" and flag(2, 2) is None
    assert report_compare.judged(*(report_compare.Figure(v, "GB/s", (v, v), 1) for v in (2, 1)))["flag"] == "slower"


def test_two_results_are_compared_section_by_section(tmp_path, capsys):
    new = copy.deepcopy(everything())
    del new["bubbles"]
    new["steps"]["machine"] = MACHINE | {"cores": 8, "versions": {**MACHINE["versions"], "jax": "0.11"}}
    new["steps"]["rows"][0]["step_seconds"] = spread(0.0246)
    new["steps"]["rows"].pop()
    for name, sections in (("a", everything()), ("b", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"kind": "report", "schema": 1, "sections": sections}))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert cli.main(["report", *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    flagged = [row for row in document["rows"] if row["flag"]]
    assert [(row["figure"], row["ratio"], row["flag"]) for row in flagged] == [
        ("data_parallel torch 2 ranks: step", 2.0, "slower")
    ]
    assert document["origins"] == ["cores: 4 -> 8", "jax: 0.10.2 -> 0.11"]
    assert document["only_new"] == []
    assert {line.partition(":")[0] for line in document["only_old"]} == {"steps", "bubbles"}
    assert cli.main(["report", *files, "--fail-on", "slower"]) == 1
    out = capsys.readouterr().out
    assert "12.3 ms" in out and "24.6 ms" in out and "2.00" in out and "slower" in out
    assert cli.main(["report", *files[:1] * 2, "--fail-on", "slower"]) == 0
    capsys.readouterr()
    assert cli.main(["report", *files, "--verbose"]) == 0
    assert capsys.readouterr().out.count("per iteration") == 24


def test_figures_of_other_sizes_are_not_compared():
    bigger = stepped()
    bigger["settings"] = bigger["settings"] | {"width": 32}
    found = report_compare.compare(*(results_io.parsed({"steps": document}) for document in (stepped(), bigger)))
    assert found["rows"] == [] and found["only_old"] and found["only_new"]
    assert compare_view.sentences(found)[0].endswith("figures are in the old result only.")


OPTIONAL = ("kind", "schema", "complete")  # what older results lack
FILES = {
    "text": "not json",
    "list": "[]",
    "other": '{"kind": "something", "schema": 1}',
    "version": '{"kind": "steps", "schema": 99}',
    "sections": '{"kind": "report", "schema": 1, "sections": {"weather": {}}}',
    "empty": '{"kind": "steps", "schema": 1}',
    "mixed": '{"kind": "report", "schema": 1, "sections": {"steps": {"kind": "bubbles"}}}',
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("missing.json missing.json", "missing.json: no such file"),
        ("text text", "text: not JSON"),
        ("list list", "list: not a result of shardiff"),
        ("other other", "other: not a result of shardiff"),
        ("version version", "version: steps has schema 99; this shardiff reads schema 1"),
        ("sections sections", "sections are not among check, diff"),
        ("empty empty", "empty: not a valid result of steps: it has no machine"),
        ("mixed mixed", "it is one of bubbles"),
        (". .", "no result of shardiff in this directory"),
        ("text", "give two results"),
        ("text text text", "give two results"),
        ("text text --quick", "nothing to measure"),
        ("--results missing.json", "missing.json: no such file"),
        ("--results text", "text: not JSON"),
        ("--section weather", "unknown section 'weather'; known: check, diff, collectives, steps, bubbles"),
        ("--fail-on slower", "fail-on needs two results"),
        ("text text --fail-on rain", "unknown fail-on 'rain'; known: slower"),
        ("--output text/report", "text/report: Not a directory"),
    ],
)
def test_wrong_input_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("shardiff: ") and err.count("\n") == 1
    assert words in err


def test_whatever_is_missing_in_a_result_is_told_and_no_traceback():
    for name, document in everything().items():
        for key in document:
            less = {k: v for k, v in document.items() if k != key}
            needed = key not in OPTIONAL and (name, key) != ("check", "settings")
            with pytest.raises(ValueError, match=f"^it has no {key}$") if needed else nullcontext():
                results_io.parse(name, less)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "a.json"
    files.write(file, {"a": 1})
    with pytest.raises(ValueError):
        files.write(file, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        files.write(file, "\ud800")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError):
        files.write(tmp_path / "directory", b"x")
    assert json.loads(file.read_text()) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "directory"]


def test_results_that_are_committed_can_be_read():
    kept = (Path(results_io.__file__).parents[1] / "results").glob("*.json")
    kinds = [
        kind
        for file in kept
        if (kind := json.loads(file.read_text()).get("kind")) in results_io.SECTIONS and results_io.read(file)
    ]
    assert {"collectives", "steps", "bubbles"} <= set(kinds)
