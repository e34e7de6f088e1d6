"""Which processes of a traced program are traced as its ranks, and what is told of the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardiff.tracing.launches import program_of, rank_command
from shardiff.tracing.settings import START, Settings
from shared_tests.tool.test_trace_script import TRACE, alone

PYTHON = sys.executable
STARTS_ITSELF = """
import os, subprocess, sys
if "LOCAL_RANK" not in os.environ:  # as Lightning does
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
import torch, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
if os.environ["LOCAL_RANK"] == "0":
    sys.exit(other.wait())
"""


@pytest.fixture
def given(tmp_path: Path) -> Settings:
    """Of a script train.py that is traced, with another beside it."""
    for name in ("train.py", "worker.py"):
        (tmp_path / name).touch()
    return Settings("/tmp/shardiff-x", "", False, "script", str(tmp_path / "train.py"), here=str(tmp_path))


def started(words: list[str], given: Settings, **options: Any) -> tuple[list[str], Settings] | None:
    """The words before the code of a rank that is traced, and what that is told; None for what is left as it is."""
    found = rank_command(words, {"cwd": given.here, **options}, given)
    if found is words:
        return None
    assert found[-2] == "-c" and found[-1].startswith(START)
    text = found[-1].removeprefix(f"{START}process.main(").removesuffix(", before)")
    return found[:-2], Settings.from_text(eval(text))


def test_the_same_script_again_is_a_rank_with_its_own_arguments_and_options_of_python(given: Settings) -> None:
    for script in (given.target, "train.py"):
        found = started([PYTHON, "-u", "-W", "ignore", script, "--rank", "1"], given)
        assert found is not None
        words, told = found
        assert words == [PYTHON, "-u", "-W", "ignore"]
        assert (told.kind, told.target, told.arguments) == ("script", script, ("--rank", "1"))
        assert told.followed and told.directory == given.directory


def test_another_program_is_a_rank_only_if_its_environment_says_so(given: Settings, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    for words in ([PYTHON, "worker.py", "7"], [PYTHON, "-m", "worker", "7"]):
        assert started(words, given) is None
        assert started(words, given, env={"RANK": "0"}) is None, "it has inherited that"
        found = started(words, given, env={"RANK": "1"})
        assert found is not None
        assert (found[0], found[1].target.removesuffix(".py"), found[1].arguments) == ([PYTHON], "worker", ("7",))
    assert started([PYTHON, "-m", "torch.distributed.run", "train.py"], given) is not None


def test_what_is_no_python_program_in_a_file_or_module_is_left_as_it_is(given: Settings) -> None:
    environment = {"RANK": "1"}
    for words in ([], ["true"], [PYTHON], [PYTHON, "-c", "pass"], [PYTHON, "-"], [PYTHON, "no.py"], [PYTHON, "-m"]):
        assert started(words, given, env=environment) is None, words
    assert started([PYTHON, "train.py"], given, shell=True) is None
    text = f"{PYTHON} train.py"
    assert rank_command(text, {"env": environment}, given) is text
    assert program_of(["python3.12", "-X", "dev", "-m", "a.b", "c"]) == (5, "module", "a.b")


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_a_script_that_starts_its_own_ranks_by_subprocess_is_traced(options: list[str], tmp_path: Path) -> None:
    done = alone([*TRACE, *options, "--nproc", "0", "--json", "train.py"], STARTS_ITSELF, tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["ranks"], document["notes"], document["disagreements"]) == (2, [], [])
    [record] = document["records"]
    assert (record["op"], record["groups"], record["source"]) == ("all_reduce", [[0, 1]], "train.py:11")
