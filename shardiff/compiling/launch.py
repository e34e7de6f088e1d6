"""Starts the process in which a user's function is compiled, and brings back its programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardiff.compiling.hardware import parse
from shardiff.compiling.meshes import sized
from shardiff.mesh import Mesh
from shardiff.program import Program
from shardiff.record import Record
from shardiff.system.extras import require

ROOT = str(Path(__file__).parents[2])
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
QUIET = {  # read by jax and the compilers when they are loaded, which the user's code does
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class UserCodeError(Exception):
    """The user's code raised. The message is one line; its traceback is on standard error."""


def place_of(function: str) -> tuple[str, str]:
    """`train.py:step` or `package.module:step` as its place and its name. Raises ValueError, one line."""
    place, _, name = function.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(f"a function is FILE.py:NAME or MODULE:NAME, such as train.py:step; got {function!r}")
    if not place.endswith(".py"):
        if not MODULE.fullmatch(place):
            raise ValueError(f"{place} is neither a Python file nor a module; give FILE.py:NAME or MODULE:NAME")
    elif not Path(place).is_file():
        raise ValueError(f"{place}: {'is a directory' if Path(place).is_dir() else 'no such file'}")
    elif not os.access(place, os.R_OK):
        raise ValueError(f"{place}: cannot be read")
    return place, name


def programs(
    function: str, targets: Sequence[str], axes: Mapping[str, int], stdout: int | None = None
) -> list[Program]:
    """What a function of a user's file communicates on each target; labels are "train.py:step on v5e:4x4".

    function: `FILE.py:NAME`; called with a mesh of `axes` on each target, it returns (function, args) or a Lowered.
    stdout: where what it prints goes, by default to standard output. It runs in a process of its own, with its folder
    first on sys.path. Raises ValueError, one line, for what cannot be compiled, and UserCodeError.
    """
    require("compile", "jax")
    place, name = place_of(function)
    for text in targets:
        sized(axes, parse(text))
    request = json.dumps({"place": place, "name": name, "axes": dict(axes), "targets": list(targets)})
    code = f"import sys; sys.path.insert(0, {ROOT!r}); import shardiff.compiling.process; sys.path.remove({ROOT!r}); "
    code += "shardiff.compiling.process.main()"
    with tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True) as folder:
        result = Path(folder, "result.json")
        status = run([sys.executable, "-P", "-c", code, str(result), request], stdout)
        if not result.exists():
            how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            raise UserCodeError(f"the process that compiles {function} ended {how}")
        answer = json.loads(result.read_text())
    if "failed" in answer:
        raise UserCodeError(answer["failed"])
    if "refusal" in answer:
        raise ValueError(answer["refusal"])
    return [program(function, fields) for fields in answer["programs"]]


def program(function: str, fields: dict) -> Program:
    """A program from its plain JSON types."""
    records = tuple(map(Record.from_json, fields["records"]))
    mesh = Mesh(tuple((name, size) for name, size in fields["axes"])) if fields["axes"] else None
    return Program(records, f"{Path(function).name} on {fields['target']}", mesh, fields["memory"])


def run(command: Sequence[str], stdout: int | None) -> int:
    """Run a process to its end, and end it with all that it has started if this one is interrupted."""
    with subprocess.Popen(command, env=QUIET | os.environ, stdout=stdout, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
