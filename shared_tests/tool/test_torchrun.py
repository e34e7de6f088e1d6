"""Under torchrun its processes are the ranks, and one of them speaks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardiff.cli import main as cli
from shardiff.ranks.torch_pool import run_on_ranks
from shardiff.system import torchrun
from shared_tests.tool.rank_functions import rank_sum

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SCRIPT = """
import json, sys
from shardiff.cli import main as cli
from shardiff.ranks.torch_pool import run_on_ranks
from shared_tests.tool.rank_functions import rank_sum
results = [run_on_ranks(rank_sum, world_size=2, device="cpu") for _ in range(2)]
sys.stdout.write(f"{json.dumps(results)}\\n")
sys.stdout.flush()
check = "check --implementation torch --strategy data_parallel --width 8 --batch 6 --degree 2 --json"
sys.exit(cli.main(check.split()))
"""


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_its_processes_are_the_ranks_of_every_call_and_a_check_prints_once(tmp_path: Path) -> None:
    """Twice, because its processes stay."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second, printed = done.stdout.split("\n", 2)
    assert json.loads(first) == json.loads(second) == [[[0, 2, 1.0], [1, 2, 1.0]]] * 2
    assert [row["passed"] for row in json.loads(printed)["rows"]] == [True]


def test_another_number_of_ranks_is_refused_with_both_numbers(
    under_torchrun: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="the run needs 3 ranks, torchrun started 2"):
        run_on_ranks(rank_sum, world_size=3, device="cpu")
    assert cli.main(["check", "--implementation", "torch", "--strategy", "data_parallel", "--degree", "4"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardiff: ") and err.count("\n") == 1 and "4" in err and "2" in err


def test_what_torchrun_sets_is_read_in_one_place(under_torchrun: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torchrun.started() == torchrun.Started(1, 2, 1, 2, has_store=False)  # so far, others may have set it
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    assert torchrun.started() == torchrun.Started(1, 2, 0, 1, has_store=True)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK must be below WORLD_SIZE, got 2 and 2"):
        torchrun.started()
    monkeypatch.setenv("RANK", "-1")
    with pytest.raises(ValueError, match="RANK must be a number, got '-1'"):
        torchrun.started()
    monkeypatch.delenv("MASTER_PORT")
    assert torchrun.started() is None
