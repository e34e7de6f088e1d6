"""No input gives a traceback: an answer, or status 2 and one line that says what was wrong, before anything starts.

Commands run in this process through `shardiff.main`; what would measure is replaced by `Started`.
"""

from __future__ import annotations

import ast
import errno
import gzip
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import commands, memory_limit
from benchmarks.bubbles import bubbles
from benchmarks.bubbles import command as bubbles_command
from benchmarks.collectives import collectives
from benchmarks.collectives import command as collectives_command
from benchmarks.documents import results_io, resume
from benchmarks.report import command as report_command
from benchmarks.steps import command as steps_command
from benchmarks.steps import steps
from contract.problem import Problem
from contract.strategy import STRATEGIES, Run, one_axis
from shardiff.cli import main as cli
from shardiff.cli import trace as trace_script
from shardiff.system import environment, files, inputs, machine, memory
from shared_tests.bench.report_documents import MACHINE, everything
from shared_tests.tool import fuzz

CASE = Path(__file__).with_name("hlo_cases") / "conditional_branches.hlo.txt"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def nothing_starts():
    """What comes after validation, replaced: it gives status 0 and prints a word."""

    def started(*_, **__):
        print("started")
        return 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (collectives_command, steps_command, bubbles_command, report_command):
            patch.setattr(module, "answer", started)
        for name in ("answer_check", "answer_diff"):
            patch.setattr(commands, name, started)
        patch.setattr(trace_script, "show", started)
        yield


def say(arguments, capsys, files=1):
    """(status, all output) of a command, which has answered, or said in one line (of each of some files) why not."""
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    if status == 2:
        assert 1 <= err.count("\n") <= files, err
        assert all(line.startswith("shardiff: ") and len(line) > 20 for line in err.splitlines()), err
    else:
        assert status in (0, 1) and err == "" and out, (status, err)
    return status, out + err


NUMBERS = ["0", "-1", "1", "2", "3", "4", "8", "100000000", "1" * 30, "9" * 4000, "9" * 5000, "nan", "inf", "-inf"]
NUMBERS += ["1e400", "1.5", "٣", "", " ", "x", "0x10", "1_000", "\n", "--json", "-", "\udcff", "é", "[/]"]
NAMES = [
    "",
    "torch",
    "cpu",
    "auto",
    "cuda",
    "float32",
    "bfloat16",
    "sgd",
    "default",
    "highest",
    "unexplained",
    "slower",
]
NAMES += [
    "data_parallel",
    "single_device",
    "annotated",
    "shard_map",
    "jax",
    "peer",
    "all_reduce",
    "a\nb",
    "\udcff",
    "[/]",
]
NAMES += [
    "cpu:8",
    "cpu:0",
    "cpu:٣",
    "h100:2x8",
    "h100:" + "9" * 5000,
    "v5e:1x1",
    "nope:1",
    ":",
    "tp=8",
    "tp=" + "9" * 5000,
]
SIZES = ["4KiB", "0", "1", "100GB", "9" * 400 + "GB", "-4KiB", "4 KiB", "4TB", "1e400", "nan", "٣", "", "KiB", "1.5MB"]
PATHS = [".", "/", "/dev/null", "/dev/full", "/dev/zero", "loop", "missing", "missing/x.json", "x" * 300, "x/" * 3000]
PATHS += [
    "a\nb.json",
    "\udcff.json",
    "out.json",
    "out.png",
    "out.txt",
    "",
    "fifo",
    "binary",
    "text.json",
    "script.py",
    "~",
]
VALUES = {"number": NUMBERS, "name": NAMES, "size": SIZES, "path": PATHS}
OPTIONS = {
    "check": "name:implementation,strategy,mesh,dtype,optimizer,device number:degree,steps,batch,width,layers,"
    "microbatches,timeout flag:json",
    "diff": "name:target,implementation,mesh,left-mesh,right-mesh,precision,fail-on,dtype "
    "number:degree,batch,width,layers,microbatches,"
    "timeout path:picture flag:json",
    "hlo": "flag:json",
    "report": "path:output,results name:section,fail-on number:timeout flag:quick,full,fresh,verbose,json",
    "targets": "flag:json",
    "trace": "number:nproc,timeout flag:json,verify",
    "bench collectives": "name:op,implementation,device number:ranks,iterations,budget,timeout size:size,min,max "
    "path:output,picture flag:bare,json,resume",
    "bench steps": "name:strategy,mesh,implementation,dtype,optimizer,device number:ranks,iterations,rounds,batch,"
    "width,layers,microbatches,speed-batch,timeout path:output,picture flag:json,resume",
    "bench bubbles": "name:implementation,dtype,device number:stages,microbatches,iterations,batch,width,layers,"
    "timeout path:output,picture,trace flag:json,resume",
}
ARGUMENTS = {"diff": NAMES + list(STRATEGIES) + PATHS, "hlo": PATHS, "report": PATHS, "trace": PATHS}


def option(command):
    """An option of a command with any value, a right one among them."""
    each = []
    for group in OPTIONS[command].split():
        kind, _, names = group.partition(":")
        for name in names.split(","):
            values = st.just([]) if kind == "flag" else st.sampled_from(VALUES[kind]).map(lambda v: [v])
            each.append(values.map(lambda value, name=name: [f"--{name}", *value]))
    return st.one_of(each)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A directory to stand in, with everything that a path can lead to. Pipes are waited for briefly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "PATIENCE", 0.01)
    monkeypatch.setattr(inputs.read_bytes, "__defaults__", (0.01,))
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    Path("binary").write_bytes(bytes(range(256)))
    Path("text.json").write_text("{}")
    Path("script.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("command", OPTIONS)
def test_no_options_of_any_command_give_a_traceback(command, nothing_starts, places, capsys):
    words = st.lists(st.sampled_from(ARGUMENTS.get(command, [""])), max_size=3 if command in ARGUMENTS else 0)
    lines = st.tuples(st.lists(option(command), max_size=4), words)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(lines)
    def tried(line):
        options, arguments = line
        say(
            [*command.split(), *sum(options, []), "--", *arguments],
            capsys,
            max(1, len(arguments)) if command == "hlo" else 1,
        )

    tried()


def test_every_option_of_every_command_is_tried():
    for command, known in OPTIONS.items():
        here = cli._command()
        for word in command.split():
            here = here.commands[word]
        named = {name for group in known.split() for name in group.partition(":")[2].split(",")}
        there = {one.lstrip("-") for p in here.params for one in [*p.opts, *p.secondary_opts] if one.startswith("--")}
        assert named == there - {"help"}, command


HUGE = {
    "check --width 100000000": "batch 128, width 100000000, 4 layers, float32 needs at least 3.2e+06 TB of memory",
    "check --layers 1000000000 --width 1 --strategy data_parallel": "needs",
    "check --batch 1000000000000 --strategy data_parallel --implementation torch": "needs",
    "check --degree 1000 --batch 1000 --strategy data_parallel": "torch runs 250 ranks at most on one machine",
    "diff data_parallel --width 100000000": "needs",
    "diff data_parallel --width 9" + "0" * 4000: "needs at least 1e+18 TB of memory",
    "bench collectives --size 64GB --ranks 4": "the largest payload needs at least 768 GB of memory, but only 1 GB",
    "bench steps --width 100000000": "needs",
    "bench steps --ranks 300 --batch 300 --strategy data_parallel": "torch runs 250 ranks at most",
    "bench bubbles --width 100000000": "needs",
    "trace --nproc 1000000 script.py": "a script in 1000000 processes needs at least 20 TB of memory",
    "check --implementation annotated --degree 2000 --batch 2000 --strategy data_parallel": "jax runs 1024 ranks at",
}


@pytest.mark.parametrize(("line", "words"), HUGE.items(), ids=lambda text: text[:60])
def test_sizes_beyond_memory_are_refused_with_the_bytes_needed_and_there(
    line, words, nothing_starts, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    status, said = say(line.split(), capsys)
    assert status == 2 and words in said


@pytest.mark.parametrize(
    "line",
    [
        "check",
        "diff data_parallel --target v5p:8x8x16 --width 100000 --batch 2048",
        "bench steps",
        "bench collectives",
        "bench bubbles",
    ],
)
def test_what_fits_is_not_refused(line, nothing_starts, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda: 4 * 10**9)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert say(line.split(), capsys)[0] == 0


def test_what_is_there_is_what_a_container_leaves_in_either_version_of_cgroups(tmp_path):
    proc, v2 = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup"
    v1 = v2 / "memory"
    for directory in (proc, v2 / "a/b", v1):
        directory.mkdir(parents=True)
    (proc / "cgroup").write_text("4:cpu,memory:/not/seen\n0::/a/b\n")
    assert list(memory.cgroup_rests(tmp_path)) == []
    files = {"memory.max": "max\n", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 100\n"}
    for group, limit in (("a/b", "max"), ("a", "1000"), ("", "")):
        for name, content in files.items():
            if group:
                (v2 / group / name).write_text(limit if name == "memory.max" else content)
    assert list(memory.cgroup_rests(tmp_path)) == [400]
    assert memory.available(tmp_path) == 400
    (v1 / "memory.limit_in_bytes").write_text("500")
    (v1 / "memory.usage_in_bytes").write_text("450")
    (v1 / "memory.stat").write_text("total_inactive_file 20\n")
    assert sorted(memory.cgroup_rests(tmp_path)) == [70, 400]
    (v1 / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert list(memory.cgroup_rests(tmp_path)) == [400]


def test_the_least_that_a_run_needs_is_less_than_what_the_closed_form_and_the_drawing_take():
    run = Run("torch", one_axis("data_parallel", 4), Problem(128, 1024, 4))
    assert memory_limit.full_model(run.problem) >= 4 * 8 * (1024**2 + 1024)
    assert memory_limit.of_run(run, 4) >= 4 * memory_limit.drawn(run.problem)
    assert memory_limit.of_run(run, 4, copies=3) == 4 * memory.PROCESS + 3 * memory_limit.held(run)


# Files


NO_FILES = {
    "missing": "no such file",
    ".": "Is a directory",
    "loop": "Too many levels of symbolic links",
    "x" * 300: "File name too long",
    "fifo": "a pipe to which no process has written",
    "/dev/zero": "an endless device",
}


@pytest.mark.parametrize(("path", "words"), NO_FILES.items(), ids=lambda text: text[:20])
def test_what_is_no_file_is_told_and_nothing_hangs(path, words, places, capsys):
    for line in (["hlo", path], ["diff", path, path], ["report", "--results", path]):
        if path != "." or line[0] != "report":
            status, said = say(line, capsys)
            assert status == 2 and words in said, line


def test_a_pipe_that_somebody_writes_to_is_read(places, capsys):
    writer = threading.Thread(target=lambda: Path("fifo").write_bytes(CASE.read_bytes()))
    writer.start()
    assert inputs.read_bytes("fifo", 30) == CASE.read_bytes()
    writer.join()


def test_what_memory_cannot_hold_is_not_read(places, monkeypatch, capsys):
    Path("bomb.gz").write_bytes(gzip.compress(b"HloModule m\n" + bytes(2_000_000), 9))
    Path("large").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(inputs, "address_space", lambda: 4_000_000)
    status, said = say(["hlo", "large"], capsys)
    assert status == 2 and "2 MB need 8 MB of memory, but only 4 MB is available" in said
    status, said = say(["hlo", "bomb.gz"], capsys)
    assert status == 2 and "the gzip file holds more than 1,000,000 bytes" in said


JSON = {
    "[" * 100_000: "nested too deeply",
    '{"records": [], "records": []}': "an object has the same key twice",
    '{"records": [NaN]}': "NaN is not a number",
    '{"records": [1e400]}': "1e400 is too large for a float",
    '{"records": [' + "9" * 5000 + "]}": "not JSON",
    '{"records": ["\\ud800"]}': "surrogates not allowed",
    "\x00": "not JSON",
    "": "not JSON",
    "[]": "has no records",
    '{"records": [[]]}': "a record has at least",
    '{"records": [{"op": "all_reduce", "dtype": "f32", "payload_bytes": 1'
    + "0" * 400
    + ', "wire_bytes": 0}]}': "2**63",
}


@pytest.mark.parametrize(("text", "words"), JSON.items(), ids=range(len(JSON)))
def test_json_that_others_would_read_differently_is_refused(text, words, places, capsys):
    Path("a.json").write_text(text)
    status, said = say(["diff", "a.json", "a.json"], capsys)
    assert status == 2 and words in said
    status, said = say(["report", "a.json", "a.json"], capsys)
    assert status == 2


def test_a_result_is_read_in_any_encoding_of_unicode_and_with_names_that_look_like_markup(places, capsys):
    document = everything()["check"]
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        Path("a.json").write_text(json.dumps(document), encoding=encoding)
        assert say(["report", "a.json", "a.json"], capsys)[0] == 0
    record = {"op": "all_reduce", "dtype": "[/]", "payload_bytes": 8, "wire_bytes": 8, "group_size": 2}
    Path("[bold].json").write_text(json.dumps({"program": "[/x]", "records": [{**record, "source": "[/y]:1"}]}))
    assert say(["diff", "[bold].json", "[bold].json"], capsys)[0] == 0


# What no table, picture or comparison reads: it follows from the rest, or nobody asks for it.
UNREAD = ("schema", "max_difference", "grad_norm_error", "label")
DERIVED = ("totals", "implementation_totals", "unexplained", "extra_bytes")


def test_every_field_of_a_result_has_a_type_that_is_checked():
    for section, document in everything().items():
        document = json.loads(json.dumps(document))
        for container, key in list(fuzz.places(document)):
            of = {"bytes": "verdict", "mesh": "label", "memory": "traced"}.get(key)  # only in objects with this key
            if key in DERIVED or (of is not None and of in container):
                del container[key]
        results_io.parse(section, document)
        for container, key in list(fuzz.places(document)):
            right = container[key]
            container[key] = {"a": {}} if not isinstance(right, dict) else [0]
            try:
                results_io.parse(section, document)
                assert key in UNREAD or (key == "bytes" and "memory_copy_GBps" in container), (section, key)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 400
            container[key] = right


# Outputs


def test_a_disk_that_is_full_loses_nothing(places, monkeypatch, capsys):
    file = Path("a.json")
    files.write(file, {"a": 1})

    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            files.write(file, {"a": 2})
        assert files.unwritable(file) == "No space left on device"
        with pytest.raises(ValueError, match=r"the output 'a.json' cannot be written: No space left on device"):
            files.check_path("output", file, ".json")
    assert json.loads(file.read_text()) == {"a": 1}
    assert not [path for path in places.iterdir() if "part" in path.name or path.name.startswith(".")]


def test_a_limit_on_the_size_of_files_is_a_full_disk(places):
    files.write(Path("a.json"), "old")
    code = (
        "import resource, signal; from pathlib import Path; from shardiff.system.files import keeper\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "keep = keeper(Path('a.json')); print(keep('x' * 2000), keep('x' * 2000), keep('short'))"
    )
    unmeasured = {name: value for name, value in env().items() if "COVERAGE" not in name}  # its data is a file, too
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=places, env=unmeasured, timeout=60
    )
    assert done.stdout == "False False False\n"
    first, second = done.stderr.splitlines()
    assert first.startswith("shardiff: a.json: cannot be written: File too large; writing to /")
    assert second.endswith("cannot be written: File too large")
    assert Path("a.json").read_text() == "old" and not list(places.glob(".*"))


def env(**more):
    """The environment of a command from this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def test_what_is_measured_goes_elsewhere_once_its_place_is_gone(places, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(places / "other"))
    monkeypatch.setattr(files.tempfile, "tempdir", None)
    (places / "other").mkdir()
    (places / "here").mkdir()
    keep = files.keeper(places / "here/a.json")
    assert keep({"blocks": 1})
    (places / "here/a.json").unlink()
    (places / "here").rmdir()
    assert not keep({"blocks": 2}) and not keep({"blocks": 3})
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "No such file or directory; writing to" in err
    (file,) = (places / "other").iterdir()
    assert json.loads(file.read_text()) == {"blocks": 3} and str(file) in err


def test_a_link_is_written_through_and_odd_places_are_refused(places):
    Path("real").mkdir()
    os.symlink("real/a.json", "link.json")
    files.write(Path("link.json"), "new")
    assert Path("real/a.json").read_text() == "new" and os.path.islink("link.json")
    os.mkfifo("pipe.json")
    for path in ("pipe.json", "x" * 300 + ".json", "missing/a.json", ".json/a.json", "a.txt", "real"):
        with pytest.raises(ValueError, match="the output"):
            files.check_path("output", Path(path), ".json")


def shell(line, **more):
    """What bash makes of a line in which $S is shardiff."""
    variables = env(S=f"{sys.executable} -m shardiff", CASE=str(CASE), **more)
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=variables, timeout=120, errors="replace"
    )


def test_output_that_nobody_reads_or_that_has_no_room_gives_no_traceback():
    done = shell(
        "$S hlo $CASE $CASE $CASE | head -c 1 >/dev/null; echo ${PIPESTATUS[0]}; $S targets > /dev/full; echo $?"
    )
    assert done.stdout.splitlines()[0] in ("0", "141") and done.stdout.splitlines()[1:] == ["2"]
    assert done.stderr == "shardiff: output: No space left on device\n"
    code = "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(r)\n"
    code += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", "shardiff", "targets", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env())
    assert (done.returncode, done.stderr) == (141, "")


def test_ascii_terminals_odd_names_and_odd_variables_are_no_trouble():
    line = "cd $(mktemp -d); cp $CASE $'\\xff\\n[b].hlo'; $S hlo $'\\xff\\n[b].hlo'; echo $?"
    odd = {
        "PYTHONIOENCODING": "ascii",
        "LANG": "C",
        "LC_ALL": "C",
        "TERM": "weird",
        "COLUMNS": "0",
        "TERMINAL_WIDTH": "x",
    }
    odd |= {"CUDA_VISIBLE_DEVICES": "nonsense", "NO_COLOR": "", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell(f"unset HOME; {line}; $S --help >/dev/null; echo $?", **odd)
    assert done.stderr == "" and done.stdout.splitlines()[-2:] == ["0", "0"]
    assert "all_reduce" in done.stdout


ODD = {
    "OMP_NUM_THREADS": ("x", "OMP_NUM_THREADS must be a number of threads, got 'x'"),
    "TMPDIR": ("x" * 200, "TMPDIR may have at most 60 characters"),
    "XLA_FLAGS": (
        "--xla_nonsense=1",
        "jax cannot start with XLA_FLAGS as set: Unknown flag in XLA_FLAGS: --xla_nonsense=1",
    ),
}


@pytest.mark.parametrize(("name", "value", "words"), [(name, *pair) for name, pair in ODD.items()])
def test_what_the_environment_gets_wrong_is_told_before_anything_starts(
    name, value, words, nothing_starts, monkeypatch, tmp_path, capsys
):
    if name == "TMPDIR":
        (tmp_path / value).mkdir()
        value = str(tmp_path / value)
        monkeypatch.setattr(environment.tempfile, "tempdir", None)
    for other in [key for key in os.environ if key.startswith("JAX_")]:
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, value)
    for line in ("check", "diff data_parallel", "bench collectives", "bench steps"):
        status, said = say(line.split(), capsys)
        assert status == 2 and words in said, line


def test_no_place_for_temporary_files_is_told(monkeypatch):
    monkeypatch.setattr(
        environment.tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError(2, "No usable directory"))
    )
    with pytest.raises(ValueError, match="^No usable directory; set TMPDIR to a directory that can be written$"):
        environment.check()


# Resuming


def finished(document, blocks):
    """A document of an interrupted run that has these blocks, at another date."""
    document = json.loads(json.dumps(document))
    document["machine"]["date"] = "2026-01-01T00:00:00+00:00"
    document["runs"] = [{"date": "2026-01-01T00:00:00+00:00", "blocks": blocks}]
    return document


@pytest.fixture
def same_machine(monkeypatch):
    """Facts of a clean checkout; the date grows."""
    monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "date": "2026-11-29T00:00:00+00:00"})


def few(todo, kept):
    """The document of `shardiff bench collectives` with every measurement replaced, and what was measured."""
    asked = []

    def call(function, *args):
        asked.append(args)
        if args[0] == "identities":
            return [dict.fromkeys(collectives.IDENTITIES, 0.0)] * 2
        times = {"per_iteration": [1e-5, 2e-5], "amortized": [1e-5], "calls": 3}
        return [[{"bytes": size, "runs_as": args[1], "correct": True, **times} for size in args[2]]] * 2

    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_pool", lambda *_: call)
        patch.setattr(
            collectives, "floor", lambda ranks: {"memory_copy_GBps": 1.0, "loopback_GBps": {"1": 1.0, "2": 1.0}}
        )
        document = collectives.run(todo, lambda d: saved.append(json.loads(json.dumps(d))), kept=kept)
    return document, asked, saved


def test_an_interrupted_bench_collectives_measures_only_what_is_missing(same_machine, places, capsys):
    todo = collectives.plan(["all_reduce", "permute"], [2], ["4KiB", "8KiB", "16KiB"], None, "cpu")
    whole, asked, saved = few(todo, None)
    assert len(asked) == 6 and [run["date"] for run in whole["runs"]] == [whole["machine"]["date"]]
    for done in range(1, 6):
        left = finished(saved[done - 1], whole["runs"][0]["blocks"][:done])
        files.write(Path("a.json"), left)
        kept = resume.earlier(Path("a.json"), collectives.begin(todo))
        again, asked, _ = few(todo, kept)
        assert len(asked) == 6 - done
        assert [again[key] for key in ("rows", "fits", "identities")] == [
            whole[key] for key in ("rows", "fits", "identities")
        ]
        assert [(run["date"][:4], len(run["blocks"])) for run in again["runs"]] == [("2026", done), ("2026", 6 - done)]
        runs = results_io.parse("collectives", again).runs
        assert "blocks come from 2 runs" in (resume.sentence(runs) or "")
    assert resume.sentence(results_io.parse("collectives", whole).runs) is None


DIFFERENT = {
    "iterations": (lambda d: d["settings"].update(iterations=7), "iterations was 7, now it is 20"),
    "commit": (lambda d: d["machine"].update(commit="fedcba"), 'machine\'s commit was "fedcba"'),
    "versions": (lambda d: d["machine"]["versions"].update(torch="2.0"), "machine's versions was"),
    "no runs": (lambda d: d.pop("runs"), "no result of shardiff bench collectives that can be resumed"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_run_with_anything_different_is_not_resumed_and_says_what(what, same_machine, nothing_starts, places, capsys):
    todo = collectives.plan(["permute"], [2], ["4KiB"], None, "cpu")
    _, _, saved = few(todo, None)
    change, words = DIFFERENT[what]
    change(saved[0])
    files.write(Path("a.json"), saved[0])
    line = "bench collectives --op permute --ranks 2 --size 4KiB --device cpu --output a.json --resume"
    status, said = say(line.split(), capsys)
    assert status == 2 and words in said
    assert say(line.replace(" --resume", "").split(), capsys)[0] == 0
    Path("a.json").unlink()
    assert say(line.split(), capsys)[0] == 0  # nothing there yet: all is measured
    status, said = say([word for word in line.split() if word not in ("--output", "a.json")], capsys)
    assert status == 2 and "--resume needs --output FILE.json" in said


def test_a_checkout_with_changes_is_never_the_same_code(same_machine, places, monkeypatch):
    todo = collectives.plan(["permute"], [2], ["4KiB"], None, "cpu")
    monkeypatch.setattr(machine, "facts", lambda: {**MACHINE, "commit": "abc+"})
    _, _, saved = few(todo, None)
    files.write(Path("a.json"), saved[0])
    with pytest.raises(ValueError, match="the checkout has changes"):
        resume.earlier(Path("a.json"), collectives.begin(todo))


def test_bench_steps_resumes_by_strategy_and_ranks_which_are_measured_in_turn(same_machine, monkeypatch):
    plan = steps.plan([2, 4], STRATEGIES[:2], ["torch"], Problem(8, 16, 4), iterations=2, rounds=1, device="cpu")
    asked = []

    def strategy(plan, run, sets, starting):
        asked.append(steps.block(run))
        part = {"strategy": run.strategy, "ranks": run.world_size, "mesh": str(run.mesh)}
        yield {"rows": [{**part, "n": 1}], "ratios": [], "failures": []}
        yield {"rows": [{**part, "n": 2}], "ratios": [part], "failures": [f"torch {steps.block(run)}: x"]}

    monkeypatch.setattr(steps, "strategy", strategy)
    monkeypatch.setattr(steps, "sets", lambda plan, runs: _Nothing())
    saved = []
    whole = steps.measure(plan, lambda d: saved.append(json.loads(json.dumps(d))))
    assert len(asked) == 4 == len(whole["rows"])
    for at, left in enumerate(saved[:-1]):
        asked.clear()
        again = steps.measure(plan, kept=finished(left, left["runs"][0]["blocks"]))
        done = len(left["runs"][0]["blocks"])
        assert len(asked) == 4 - done, at
        assert [again[key] for key in ("rows", "ratios", "failures")] == [
            whole[key] for key in ("rows", "ratios", "failures")
        ]


class _Nothing:
    def __enter__(self):
        return {}

    def __exit__(self, *_):
        return None


def test_bench_bubbles_resumes_by_run(same_machine, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 4)
    plan = bubbles.plan([2], [1, 2, 4], ["torch"], Problem(8, 16, 4), iterations=2, device="cpu")
    asked = []

    def row(run, by_rank):
        asked.append(bubbles.block(run))
        return bubbles._row(run, "torch", [0.5], [0.1 / run.microbatches]), [
            bubbles.timeline.Event(0, "forward", 0, 0, 1)
        ]

    monkeypatch.setattr(bubbles, "torch_row", row)
    monkeypatch.setattr(bubbles, "pools", lambda plan, runs, stack: {True: lambda *_: None})
    saved = []
    whole = bubbles.measure(plan, lambda d: saved.append(json.loads(json.dumps(d))))
    asked.clear()
    again = bubbles.measure(plan, kept=finished(saved[1], saved[1]["runs"][0]["blocks"]))
    assert len(asked) == 1 and json.loads(json.dumps(again["rows"])) == json.loads(json.dumps(whole["rows"]))
    assert len(again["timelines"]) == 3 and again["fits"]


# Fuzzing


def test_a_slice_of_the_campaign(tmp_path):
    failed = [
        f"{kind}:{number} {why}"
        for kind, count in (("hlo", 300), ("json", 100))
        for number in range(count)
        if (why := fuzz.one(kind, 1, number, tmp_path)[2])
    ]
    assert failed == []


def test_an_input_of_the_campaign_can_be_made_again():
    assert [fuzz.make(kind, 3, 7) for kind in fuzz.KINDS] == [fuzz.make(kind, 3, 7) for kind in fuzz.KINDS]
    assert len({fuzz.make("hlo", 3, number)[1] for number in range(50)}) > 45


@pytest.mark.parametrize(
    "text", ["mesh['x'=" + "1" * 5000 + "]{'x'}", "[" + "1" * 5000 + ",1]<=[2]", "{{" + "1" * 5000 + "}}"]
)
def test_an_error_quotes_no_more_than_a_line_s_worth_of_the_program(text, places, capsys):
    body = f"ROOT %r = f32[8] all-reduce(%p), replica_groups={text}, to_apply=%add"
    from shared_tests.tool.hlo_modules import module

    Path("a.hlo").write_text(module(body))
    status, said = say(["hlo", "a.hlo"], capsys)
    assert status == 2 and len(said) < 400


def test_a_campaign_survives_inputs_that_crash_hang_or_take_all_memory(monkeypatch):
    share = fuzz.Share([("hlo", 0), ("hlo", 1)], 0)
    share.process = SimpleNamespace(kill=lambda: None, join=lambda: None)
    started = []
    monkeypatch.setattr(fuzz.Share, "start", lambda self: started.append(self.jobs))
    tally = fuzz.Tally()
    share.lost(tally, "the process ended with -11")
    assert tally.failures == [("hlo", 0, "the process ended with -11")] and started == [[("hlo", 1)]]
    with pytest.raises(fuzz.Flaw, match="not done after 0.05 s"), fuzz.time_limit(0.05):
        while True:
            pass


# Nothing read is run


ALLOWED = {  # the few places that run or unpickle, and whose bytes those are
    ("shardiff/ranks/rank.py", "pickle.load"),  # the caller's job, from a nameless file of its own
    ("shardiff/ranks/messages.py", "pickle.loads"),  # between a caller and its own ranks, over socket pairs
    ("shardiff/tracing/process.py", "runpy.run_path"),  # the user's own script, which is what was asked for
    ("shardiff/tracing/process.py", "exec"),  # what that script starts with python -c
}
FORBIDDEN = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "marshal.loads",
    "torch.load",
    "np.load",
}
FORBIDDEN |= {"runpy.run_path", "dill.loads", "shelve.open", "ast.literal_eval", "os.system"}


def test_nothing_that_is_read_is_unpickled_or_evaluated():
    found = set()
    for package in ("shardiff", "contract", "torch_impl", "jax_impl", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in FORBIDDEN:
                    found.add((str(file.relative_to(ROOT)), name))
                shell = isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle")
                assert not (shell and ast.unparse(node.value) == "True"), file
    assert found <= ALLOWED, found - ALLOWED
