"""Full disks, closed pipes, odd terminals and odd variables lose no result and give no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardiff.system import environment, files
from shared_tests.tool.answers import CASE, ROOT, say


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
    """The result of a line of bash in which $S is shardiff."""
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
