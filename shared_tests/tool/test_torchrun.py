"""Under torchrun its processes are the ranks, and one of them speaks."""

from __future__ import annotations

import json
import subprocess
import sys


def check(*options: str) -> subprocess.CompletedProcess[str]:
    """`shardiff check` of one strategy in two processes of torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardiff"]
    arguments = ["check", "--implementation", "torch", "--strategy", "data_parallel", "--width", "8", "--batch", "6"]
    return subprocess.run([*torchrun, *arguments, *options], capture_output=True, text=True, timeout=120)


def test_a_check_under_torchrun_prints_once():
    done = check("--degree", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["passed"] for row in json.loads(done.stdout)["rows"]] == [True]


def test_a_degree_that_torchrun_does_not_have_is_refused_with_both_numbers():
    done = check("--degree", "4")
    assert done.returncode != 0
    assert any("2" in line and "4" in line and "shardiff:" in line for line in done.stderr.splitlines()), done.stderr
