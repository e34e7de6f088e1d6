"""Scripts that start ranks: the ranks run the script's functions, and end with the script however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared_tests.tool.rank_functions import assert_gone

ROOT = Path(__file__).parents[2]

RANKS = """
import os, time
from shardiff.ranks.rank import report_progress
def hold(device):
    report_progress(os.getpid())
    time.sleep(1000)
"""
# Modules whose names are those of shardiff's parts and of the lesson, and which nobody may import by mistake.
DECOYS = ("contract.py", "record.py", "shardiff_helpers.py", "benchmarks/__init__.py", "torch_impl/__init__.py")


def script(tmp_path: Path, text: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    """Start a script that is not in the package, by default with this Python."""
    path = tmp_path / "script.py"
    path.write_text(text)
    (tmp_path / "ranks.py").write_text(RANKS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [*(command or [sys.executable]), str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    with process:
        try:
            out, err = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


FUNCTION_IN_MAIN = """
import warnings
import shardiff.ranks.torch_pool
def function(device):
    import torch, torch.distributed as dist
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print("a rank speaks")
        warnings.warn("careful")
    return dist.get_rank(), total.item()
results = []
if __name__ == "__main__":
    results = shardiff.ranks.torch_pool.run_on_ranks(function, world_size=2, device="cpu")
    print(results)
"""


def test_function_of_a_script_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(script(tmp_path, FUNCTION_IN_MAIN))
    assert code == 1
    assert err.endswith("ValueError: function is defined in the script that runs; ranks need it in a module\n")


def test_function_of_a_module_that_runs_by_name_without_standard_input_beside_modules_called_as_ours(
    tmp_path: Path,
) -> None:
    for name in DECOYS:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise SystemExit('the wrong module')")
    python = f'exec "{sys.executable}" -m script <&-'
    code, out, err = finish(script(tmp_path, FUNCTION_IN_MAIN, "sh", "-c", python, cwd=tmp_path))
    assert (code, out) == (0, "a rank speaks\n[(0, 1.0), (1, 1.0)]\n"), err
    assert err.count("\n") == 2 and "UserWarning: careful" in err  # what ranks write passes through
    assert list((tmp_path / "tmp").iterdir()) == []


HELD = """
import sys
from ranks import hold
from shardiff.ranks.torch_pool import workers
try:
    with workers(2, "cpu") as pool:
        pool.call(hold, on_progress=lambda rank, pid: print(pool.processes.starter.pid, pid, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_caller_not_even_a_rank_that_is_stopped(tmp_path: Path, how: signal.Signals) -> None:
    process = script(tmp_path, HELD)
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    assert len(set(pids)) == 3
    os.kill(pids[-1], signal.SIGSTOP)
    os.killpg(process.pid, how)
    assert finish(process) == (130 if how == signal.SIGINT else -how, "", "")
    assert_gone(pids)
    assert list((tmp_path / "tmp").iterdir()) == []
