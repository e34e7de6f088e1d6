"""`shardiff report`: its files, from results made up here, and what it keeps from an earlier run."""

from __future__ import annotations

import copy
import json
import os
from html.parser import HTMLParser

import pytest

from benchmarks import commands as lesson
from benchmarks import diff as diff_command
from benchmarks.bubbles import command as bubbles_command
from benchmarks.collectives import command as collectives_command
from benchmarks.documents import results_io
from benchmarks.documents.results_io import SECTIONS, parsed
from benchmarks.report import command, html, report, sections
from benchmarks.report import run as report_run
from benchmarks.report.blocks import Cell, Details, Items, Section, Table, Text
from benchmarks.report.markdown import markdown, plain
from benchmarks.steps import command as steps_command
from shardiff.cli import main as cli
from shardiff.system import files
from shared_tests.bench.report_documents import MACHINE, checked, diffed, everything, stepped

VOID = ("meta", "img", "br")


@pytest.fixture
def inputs(tmp_path):
    """A directory with a file for each result."""
    directory = tmp_path / "inputs"
    directory.mkdir()
    for name, document in everything().items():
        (directory / f"{name}-of-today.json").write_text(json.dumps(document))
    (directory / "trace.json").write_text('{"traceEvents": []}')  # of something else, so not looked at
    return directory


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a report on everything."""
    directory = tmp_path_factory.mktemp("report")
    assert command.answer(report.Plan(directory, quick=True, given=everything()), False, False) == 0
    return directory


class Page(HTMLParser):
    """Fails if tags are not nested properly; collects the visible text and every address."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.seen, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.ids += [value] if name == "id" else []
            self.addresses += [value] if name in ("src", "href", "srcset", "data", "action") else []
            assert not name.startswith("on")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen += [] if self.open and self.open[-1] == "style" else [data]


def test_the_page_is_well_formed_and_needs_nothing_else(made):
    text = (made / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    assert page.addresses
    for address in page.addresses:
        assert address.startswith(("#", "data:image/svg+xml;base64,"))
    assert {address[1:] for address in page.addresses if address[0] == "#"} == set(SECTIONS) == set(page.ids)
    assert "@import" not in text and "url(" not in text and "http" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "width=device-width" in text


def test_page_and_markdown_hold_every_section_with_its_values(made):
    seen = " ".join(Page((made / "report.html").read_text()).seen)
    source = (made / "report.md").read_text().replace("\\", "")
    for value in (
        "2 of 2 runs equal", "7.3e-07", "not finite", "at most 1e-12 in float64",  # check
        "h100:2", "1 only written", "no rule explains", "v5e:2x2 was left out: its compiler refused",  # diff
        "busbw is flat from 2 to 4 ranks.", "12.5 GB/s", "One process per rank.", "10 us",  # collectives
        "data_parallel / ddp 0.61", "12.3", "to within 0.0%", "after a barrier",  # steps
        "52% of the stages' time", "0.520", "1.04",  # bubbles
        "Example CPU, 4 cores", "torch 2.11.1", "jaxlib 0.10.2", "commit abcdef0123;", "2026-01-02 03:04 UTC",
        "CPU processes over gloo", "This is a quick report",
    ):  # fmt: skip
        assert value in seen, value
        assert value in source, value
    names = sorted(path.name for path in (made / "pictures").iterdir())
    assert names == [f"{name}.svg" for name in ("bandwidth", "bubbles", "diff_data_parallel", "diff_tensor_parallel",
                                                "memory", "steps")]  # fmt: skip
    assert all(f"(pictures/{name})" in source for name in names)


def test_everything_is_in_the_json_beside_it_and_can_be_read_back(made, capsys):
    assert {name: one["machine"] for name, one in results_io.read(made / "report.json").items()} == dict.fromkeys(
        SECTIONS, MACHINE
    )
    assert results_io.read(made) == results_io.read(made / "report.json")
    assert json.loads((made / "bubbles_trace.json").read_text())["traceEvents"]
    assert sorted(path.name for path in made.iterdir() if path.name.startswith(".")) == []


def test_what_users_call_things_is_text_and_never_markup():
    hostile = '<script>"&|`*_x_[a](b)\n# x'
    blocks = [Text(hostile), Items([hostile]), Table([hostile], [False], [[Cell(hostile)]], hostile)]
    for block in [*blocks, Details(hostile, blocks)]:
        page = Page(html.page("", [], [Section("a", "", [block])], ""))
        assert "script" not in page.tags
        assert "<script>" in "".join(page.seen)
        assert "<script>" not in markdown(block)
        assert "[a](b)" not in markdown(block)
    table = markdown(Table(["a|b"], [True], [[Cell("c|d\ne", "red")]]))
    assert table == "| a\\|b |\n| --: |\n| **c\\|d<br>e** |"
    assert plain("torch data_parallel - 1 * 2") == "torch data_parallel - 1 \\* 2"


def test_partial_results_are_shown_and_said_to_be_partial(tmp_path):
    given = {"steps": stepped() | {"complete": False, "ratios": [], "single_device": []}, "check": checked()}
    given["steps"]["rows"] = given["steps"]["rows"][:1]
    given["steps"]["rows"][0] |= {"compute_seconds": None, "exposed_seconds": None, "exposed_share": None}
    given["steps"]["rows"][0]["memory"] = {"measured": dict.fromkeys(("parameters", "gradients", "optimizer_state",
                                           "activations", "temporaries")), "closed_form": None}  # fmt: skip
    todo = report.plan(tmp_path, [], ["steps", "check"], False, False)
    assert command.answer(report.Plan(tmp_path, todo.sections, given=given), False, False) == 0
    seen = " ".join(Page((tmp_path / "report.html").read_text()).seen)
    assert "Partial: the measurement was not completed." in seen and "12.3" in seen
    assert "The bubble" not in seen and "This is a quick report" not in seen


def test_a_result_with_nothing_in_it_yet_is_shown():
    for name, document in everything().items():
        empty = {key: [] if isinstance(value, list) else value for key, value in document.items()}
        empty |= {"flat": None} if name == "collectives" else {}
        assert sections.section(name, results_io.parse(name, empty), lambda *_: []).blocks, name


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("check", lambda d: d["rows"][0].update(passed=False)),
        ("collectives", lambda d: d["rows"][0].update(correct=False)),
        ("collectives", lambda d: d["identities"][0].update(holds=False)),
        ("steps", lambda d: d["failures"].append("ddp differs")),
    ],
)
def test_what_does_not_hold_makes_the_status_1(section, change):
    sections = copy.deepcopy(everything())
    assert report.Report({}, parsed(sections)).holds
    change(sections[section])
    assert not report.Report({}, parsed(sections)).holds


@pytest.fixture
def commands(monkeypatch):
    """Replaces the commands that measure: returns the lines that would run, which give made-up results."""
    lines, failing = [], {}

    def output(line, *rest):
        section = next(name for name in SECTIONS if name in line.split())
        lines.append(section)
        if section in failing:
            raise failing[section]
        document = everything()[section]
        if rest:
            with open(rest[-1], "w") as file:
                json.dump(document, file)
        return "\n".join(map(json.dumps, document["diffs"])) if section == "diff" else json.dumps(document)

    monkeypatch.setattr(report_run, "output", output)
    monkeypatch.setattr(report_run, "targets", lambda quick: ["cpu:2", "h100:2"])
    monkeypatch.setattr(report_run.machine, "facts", lambda: copy.deepcopy(MACHINE))
    monkeypatch.setattr(report, "write_all", lambda made, directory: None)
    output.lines, output.failing = lines, failing
    return output


def test_finished_sections_are_taken_again_unless_something_has_changed(commands, tmp_path, monkeypatch):
    def measured(quick=True, fresh=False, **facts):
        commands.lines.clear()
        monkeypatch.setattr(report_run.machine, "facts", lambda: MACHINE | facts)
        report.gather(report.Plan(tmp_path, quick=quick, fresh=fresh))
        return commands.lines

    assert measured() == list(SECTIONS)
    assert measured(date="2026-01-03T00:00:00+00:00") == []
    assert measured(fresh=True) == list(SECTIONS)
    assert measured(cpu="another") == list(SECTIONS)
    assert measured(commit="another") == list(SECTIONS)
    assert measured(versions={**MACHINE["versions"], "jax": "0.11"}) == list(SECTIONS)
    assert measured(quick=False) == list(SECTIONS)  # other sizes
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"complete": False}))
    assert measured(quick=False) == ["steps"]
    file.write_text("half of a f")
    assert measured(quick=False) == ["steps"]


def test_a_commit_with_changes_is_never_the_same(commands):
    changed = {**MACHINE, "commit": "abc+"}
    assert results_io.same_origin(MACHINE, MACHINE | {"date": "later"})
    assert not results_io.same_origin(changed, changed)


def test_what_was_done_before_an_interruption_is_kept(commands, tmp_path):
    commands.failing["collectives"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        report.gather(report.Plan(tmp_path))
    assert results_io.read(tmp_path).keys() == {"check", "diff"}
    commands.failing.clear()
    commands.lines.clear()
    assert report.gather(report.Plan(tmp_path)).results.keys() == set(SECTIONS)
    assert commands.lines == ["collectives", "steps", "bubbles"]


def test_a_section_that_fails_is_named_and_the_others_go_on(commands, tmp_path, capsys):
    commands.failing["steps"] = report_run.Failed("shardiff bench steps ended with status 3")
    assert command.answer(report.Plan(tmp_path), False, True) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["failures"] == {"steps": "shardiff bench steps ended with status 3"}
    assert list(document["sections"]) == [name for name in SECTIONS if name != "steps"]
    assert err == ""
    told = "steps is not complete: shardiff bench steps ended with status 3."
    made = report.Report(document, {})
    assert made.lines()[-1] == told and told in [getattr(block, "text", "") for block in report.content(made)[0]]


def test_what_a_failed_command_has_left_is_shown(commands, tmp_path, monkeypatch):
    def measure(section, line, directory):
        files.write(directory / f"{section}.json", everything()[section] | {"complete": False})
        raise report_run.Failed("ended with status 3")

    files.write(tmp_path / "steps.json", everything()["steps"])  # of an earlier run
    os.utime(tmp_path / "steps.json", (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(report_run, "measure", measure)
        made = report.gather(report.Plan(tmp_path, ("bubbles",)))
        assert made.failures and not made.results["bubbles"].complete
    commands.failing["steps"] = report_run.Failed("ended with status 3")
    assert report.gather(report.Plan(tmp_path, ("steps",))).results == {}


def test_a_compiler_that_refuses_leaves_the_other_targets(commands, monkeypatch):
    def output(line, *rest):
        if "h100:2" in line:
            raise report_run.Failed("refused")
        return json.dumps(diffed()["diffs"][0])

    monkeypatch.setattr(report_run, "output", output)
    document = report_run.diffs(report_run.command("diff", True))
    assert [one["target"] for one in document["diffs"]] == ["cpu:2"]
    assert document["skipped"] == [{"target": "h100:2", "reason": "refused"}]


def test_results_that_are_given_are_not_measured(commands, inputs, tmp_path, capsys):
    given = [str(inputs / "check-of-today.json"), str(inputs / "steps-of-today.json")]
    arguments = ["report", "--results", given[0], "--results", given[1], "--output", str(tmp_path / "out" / "deep")]
    assert cli.main([*arguments, "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert commands.lines == ["diff", "collectives", "bubbles"]
    assert "report.html" in out and "2 of 2 runs equal" in out
    assert "check: given\n" in err and "bubbles: shardiff bench bubbles\n" in err


@pytest.mark.parametrize("quick", [True, False])
def test_every_command_that_measures_is_one(quick, monkeypatch):
    ran = []
    answers = {
        "check": (lesson, "answer_check"),
        "diff": (diff_command, "answer_diff"),
        "collectives": (collectives_command, "answer"),
        "steps": (steps_command, "answer"),
        "bubbles": (bubbles_command, "answer"),
    }
    for kind, (module, name) in answers.items():
        monkeypatch.setattr(module, name, lambda *args, kind=kind: ran.append(kind) or 0)
    for kind in SECTIONS:
        assert cli.main([*report_run.command(kind, quick).split(), "--json"]) == 0
    assert ran == list(SECTIONS)


def test_a_command_runs_in_a_process_of_its_own():
    assert json.loads(report_run.output("targets"))["targets"]
    with pytest.raises(report_run.Failed, match="shardiff check --width 0 ended with status 2"):
        report_run.output("check --width 0")
