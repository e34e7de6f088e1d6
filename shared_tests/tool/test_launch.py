"""Worker processes start, give their results by rank, and, however they fail, it is said and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from shardiff.ranks import processes
from shardiff.ranks import torch_rank as worker
from shardiff.ranks.processes import CALL, PHASE
from shardiff.ranks.torch_pool import WorkerError, Workers, report_phase, report_progress, run_on_ranks, workers
from torch_impl import collectives

ROOT = Path(__file__).parents[2]
NUM_RANKS = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Workers]:
    with workers(NUM_RANKS, "cpu") as pool:
        yield pool


@pytest.fixture
def patience(pool: Workers) -> Iterator[float]:
    """A short timeout, for calls that get stuck."""
    before, pool.timeout = pool.timeout, 2.0
    yield pool.timeout
    pool.timeout = before


# What the ranks run


def rank_sum(device: torch.device, value: float = 1.0) -> tuple[int, int, float]:
    total = torch.tensor(value * dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def step(device: torch.device, fault: Fault | None = None) -> int:
    """Two collectives in two phases, as a training step has them. The fault is in place since it was unpickled."""
    for phase in ("forward", "backward"):
        report_phase(phase)
        dist.all_reduce(torch.ones(100))
    report_phase("update")
    return os.getpid()


class Fault:
    """An argument that makes rank `rank` fail when it reports `phase`. It does so by being unpickled there."""

    def __init__(self, phase: str, how: str, rank: int = 2):
        self.args = (phase, how, rank)

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, str, int]]:
        return plant, self.args


def plant(where: str, how: str, rank: int) -> None:
    this = worker._this_rank
    if this is None or this.rank != rank:
        return
    report = this.report_phase

    def report_and_fail(phase: str) -> None:
        report(phase)
        if phase == where:
            fail(how)

    this.report_phase = report_and_fail


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("the planted error")
    elif how == "allocate":
        torch.empty(1 << 60, dtype=torch.uint8)
    elif how == "exit 0":
        os._exit(0)
    elif how == "sleep":
        time.sleep(1000)
    elif how == "spin":
        while True:
            pass
    else:
        os.kill(os.getpid(), signal.Signals[how])


def double(device: torch.device, array: np.ndarray) -> np.ndarray:
    return array * (2 if dist.get_rank() == 0 else 0)


def count(device: torch.device, pause: float = 0) -> int:
    for i in range(3):
        report_progress((i, os.getpid()))
        time.sleep(pause)
    return threads() if pause == 0 else 0


def threads() -> int:
    return torch.get_num_threads()


def noted(device: torch.device) -> list[str]:
    """What this rank has noted after each collective."""
    this, world = worker._this_rank, dist.group.WORLD
    assert this is not None and world is not None
    n, rank, x = world.size(), world.rank(), torch.zeros(world.size(), 10)
    calls: list[Callable[[], Any]] = [
        lambda: collectives.broadcast(x, 0, world),
        lambda: collectives.scatter(x if rank == 0 else None, 0, world, like=x[:1]),
        lambda: collectives.gather(x, 0, world),
        lambda: collectives.reduce(x, 0, world),
        lambda: collectives.all_gather(x, world),
        lambda: collectives.reduce_scatter(x, world),
        lambda: collectives.all_reduce(x, world),
        lambda: collectives.all_to_all(x, world),
        lambda: dist.barrier(),
        lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
    ]
    found = []
    for call in calls:
        call()
        number, size, op, whom = CALL.unpack_from(this.notes.memory, this.notes.start + PHASE.size)
        found.append(f"{number} {op.rstrip(bytes(1)).decode()} {size} {whom.rstrip(bytes(1)).decode()}")
    assert n * 40 == x.nbytes
    return found


def trained(device: torch.device) -> list[str]:
    """The phases of a step that reports none itself."""
    this = worker._this_rank
    assert this is not None
    phases: list[str] = []
    this.report_phase = phases.append
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], 0.1)
    w.square().sum().backward()
    optimizer.step()
    return list(phases)


def with_a_process(device: torch.device, fault: Fault | None = None) -> None:
    """A rank that leaves a process of its own in a session of its own."""
    report_progress(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
    report_phase("forward")


def pickles_badly(device: torch.device) -> Any:
    return lambda: None


def listening(device: torch.device) -> list[str]:
    """The addresses at which this process listens, once it has connected to the others."""
    dist.all_reduce(torch.ones(1))
    return [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]


# Calls that succeed


@pytest.mark.parametrize("world_size", [1, 2, 4, 2, 1])
def test_results_come_by_rank(pool: Workers, world_size: int) -> None:
    total = 1.5 * world_size * (world_size - 1) / 2
    expected = [(rank, world_size, total) for rank in range(world_size)]
    assert pool.call(rank_sum, 1.5, world_size=world_size) == expected


def test_a_call_starts_fresh_processes(pool: Workers) -> None:
    first, second = pool.call(step), pool.call(step)
    assert len({*first, *second, os.getpid()}) == 2 * NUM_RANKS + 1


def test_large_arrays_there_and_back(pool: Workers) -> None:
    array = np.arange(8 << 20, dtype=np.float64)
    doubled, zero = pool.call(double, array, world_size=2)
    assert np.array_equal(doubled, 2 * array) and not zero.any() and doubled.flags.writeable


def test_progress_arrives_in_order(pool: Workers) -> None:
    seen: list[tuple[int, int]] = []
    pool.call(count, world_size=2, on_progress=lambda rank, value: seen.append((rank, value[0])))
    assert [i for rank, i in seen if rank == 0] == [i for rank, i in seen if rank == 1] == [0, 1, 2]


def test_ranks_share_the_cores(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    if "OMP_NUM_THREADS" in os.environ:
        pytest.skip("OMP_NUM_THREADS is set")
    for world_size in (1, NUM_RANKS):
        expected = max(1, worker.num_cores() // world_size)
        assert pool.call(count, world_size=world_size) == [expected] * world_size


def test_two_pools_at_once(pool: Workers) -> None:
    with workers(2, "cpu") as other, ThreadPoolExecutor() as threads:
        calls = [threads.submit(one.call, rank_sum, 2.0, world_size=2) for one in (pool, other)]
        assert [call.result() for call in calls] == [[(0, 2, 2.0), (1, 2, 2.0)]] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_only(pool: Workers) -> None:
    addresses = {address for rank in pool.call(listening) for address in rank}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


def test_the_last_collective_is_noted_with_its_number_bytes_and_group(pool: Workers) -> None:
    first, second = pool.call(noted, world_size=2)
    ops = {"broadcast": 80, "scatter": 80, "gather": 160, "reduce": 80, "all_gather": 160, "reduce_scatter": 80}
    ops |= {"all_reduce": 80, "all_to_all": 80, "barrier": 0}
    assert first[:-1] == second[:-1] == [f"{i} {op} {size} ranks 0 1" for i, (op, size) in enumerate(ops.items(), 1)]
    assert (first[-1], second[-1]) == ("1 send to 1 80 ranks 0 1", "1 receive from 0 80 ranks 0 1")


def test_the_phases_of_any_training_step_are_known(pool: Workers) -> None:
    assert pool.call(trained, world_size=1) == [["backward", "update", "forward"]]


@pytest.mark.parametrize("how", [None, "SIGKILL"])
def test_what_a_rank_has_started_ends_with_it(pool: Workers, how: str | None) -> None:
    seen: list[int] = []
    with suppress(WorkerError):
        pool.call(
            with_a_process, how and Fault("forward", how, 0), world_size=2, on_progress=lambda _, pid: seen.append(pid)
        )
    assert len(seen) == 2
    assert_gone(seen)


def test_silence_is_over_when_nobody_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds from the last sign of life, of processes that use no, some and all of a core until they stop at 70 s."""
    for share, limit in ((0.0, 30), (0.1, 100), (1.0, 100)):
        now = 0.0
        monkeypatch.setattr(processes.time, "monotonic", lambda: now)
        monkeypatch.setattr(processes, "work", lambda pid: share * min(now, 70))
        silence = processes.Silence(30, [1, 2])
        while not silence.over():
            now += 0.2
        assert limit - 2 < now < limit + 0.3, share
    monkeypatch.setattr(processes, "work", lambda pid: now)
    silence.heard()
    began = now
    while not silence.over():
        now += 0.2
    assert now - began == pytest.approx(300, abs=1)  # it works, but says nothing: ten times as long


# Calls that cannot work


def test_sizes_and_devices_that_cannot_work_are_refused(pool: Workers) -> None:
    for world_size in (0, NUM_RANKS + 1):
        with pytest.raises(ValueError, match=f"pool of {NUM_RANKS} ranks cannot run {world_size}"):
            pool.call(rank_sum, world_size=world_size)
    with pytest.raises(ValueError, match="world_size must be 1 to 250, got 0"), workers(0):
        pass
    with pytest.raises(ValueError, match="unknown device 'tpu'"):
        run_on_ranks(rank_sum, world_size=1, device="tpu")


def test_cuda_needs_a_gpu_per_rank() -> None:
    n = torch.cuda.device_count() + 1
    with pytest.raises(ValueError, match=f"{n} ranks, {n - 1} GPUs"):
        run_on_ranks(rank_sum, world_size=n, device="cuda")


# Calls that fail


def assert_nothing_runs(pool: Workers) -> None:
    """The ranks of a call have ended when it returns, and have been waited for."""
    assert psutil.Process(pool.starter.pid).children() == []


@pytest.mark.parametrize("phase", ["rendezvous", "start-up", "forward", "backward", "update", "teardown"])
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_failed_rank_is_named_first_with_its_phase(pool: Workers, phase: str, how: str) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault(phase, how))
    assert time.monotonic() - began < 10
    assert (caught.value.rank, caught.value.phase) == (2, phase)
    if how == "raise":
        assert caught.value.kind == "raised"
        assert str(caught.value).startswith(
            f"rank 2 of 4 raised in phase {phase}:\n\nTraceback (most recent call last)"
        )
        assert caught.value.traceback.rstrip().endswith("ValueError: the planted error")
    else:
        assert caught.value.kind == "died"
        assert str(caught.value).startswith(f"rank 2 of 4 died in phase {phase}: killed by SIGKILL")
    assert_nothing_runs(pool)
    assert len(pool.call(step)) == NUM_RANKS


@pytest.mark.parametrize(
    "how, said",
    [
        ("exit 0", "died in phase backward: it exited with status 0"),
        ("SIGSEGV", "died in phase backward: killed by SIGSEGV\n\nFatal Python error: Segmentation fault"),
        ("allocate", "raised in phase backward:\n\nTraceback"),
    ],
)
def test_how_it_failed_is_said(pool: Workers, how: str, said: str) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault("backward", how, rank=0))
    assert str(caught.value).startswith(f"rank 0 of 4 {said}")
    assert_nothing_runs(pool)


@pytest.mark.parametrize(
    "phase, how, said",
    [
        ("rendezvous", "SIGSTOP", "it is stopped"),
        ("forward", "sleep", "time.sleep(1000)"),
        ("teardown", "SIGSTOP", "it is stopped"),
    ],
)
def test_stuck_rank_is_named_first_with_its_phase(
    pool: Workers, patience: float, phase: str, how: str, said: str
) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        pool.call(step, Fault(phase, how))
    assert time.monotonic() - began < patience + 10
    assert (caught.value.rank, caught.value.phase, caught.value.kind) == (2, phase, "stuck")
    assert said in str(caught.value)
    last = "all_reduce no. 1, 400 bytes, ranks 0 1 2 3" if phase in ("forward", "backward") else ""
    waiting = f"rank 0 of 4, in phase {'forward' if last else phase}, waits for others; last call: {last}"
    assert waiting in str(caught.value) or phase == "teardown"
    assert_nothing_runs(pool)


def test_slow_is_not_stuck(pool: Workers, patience: float) -> None:
    assert pool.call(count, patience * 0.3, world_size=1) == [0]


def test_result_that_cannot_be_pickled_is_the_ranks_error(pool: Workers) -> None:
    with pytest.raises(WorkerError, match="(?s)rank . of 4 raised in phase teardown.*pickle"):
        pool.call(pickles_badly)


def test_error_in_the_callers_callback_ends_the_ranks(pool: Workers) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.call(count, 100, on_progress=lambda rank, value: 1 // 0)
    assert_nothing_runs(pool)


def test_pool_outlives_its_starter(pool: Workers) -> None:
    seen: list[int] = []

    def kill_starter(rank: int, value: tuple[int, int]) -> None:
        seen.append(value[1])
        pool.starter.kill()

    with pytest.raises(WorkerError, match="the process that starts the ranks failed: killed by SIGKILL"):
        pool.call(count, 100, on_progress=kill_starter)
    assert_gone(seen)
    assert len(pool.call(step)) == NUM_RANKS


# Scripts of their own


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


def assert_gone(pids: list[int], patience: float = 5) -> None:
    """Processes end within a moment. A dead one that its new parent has not waited for yet is gone too."""
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], patience)
    assert [process for process in alive if process.is_running() and process.status() != "zombie"] == []


RANKS = """
import os, time, warnings
from shardiff.ranks.torch_pool import report_progress
def rank_sum(device):
    import torch, torch.distributed as dist
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()
def speak(device):
    print("out")
    warnings.warn("careful")
def hold(device):
    report_progress(os.getpid())
    time.sleep(1000)
"""
PLAIN = """
from ranks import rank_sum
from shardiff.ranks.torch_pool import run_on_ranks
print(run_on_ranks(rank_sum, world_size=2, device="cpu"))
"""


def test_script_without_main_guard_or_standard_input(tmp_path: Path) -> None:
    process = script(tmp_path, PLAIN, "sh", "-c", f'exec "{sys.executable}" "$0" <&-')
    assert finish(process) == (0, "[(0, 1.0), (1, 1.0)]\n", "")
    assert list((tmp_path / "tmp").iterdir()) == []


def test_output_of_ranks_passes_through(tmp_path: Path) -> None:
    text = "import ranks\nfrom shardiff.ranks import torch_pool\n"
    text += "torch_pool.run_on_ranks(ranks.speak, world_size=1, device='cpu')"
    code, out, err = finish(script(tmp_path, text))
    assert (code, out) == (0, "out\n") and "UserWarning: careful" in err


FUNCTION_IN_MAIN = """
import shardiff.ranks.torch_pool
def function(device):
    return 7
if __name__ == "__main__":
    print(shardiff.ranks.torch_pool.run_on_ranks(function, world_size=1, device="cpu"))
"""


def test_function_of_a_script_is_refused(tmp_path: Path) -> None:
    code, _, err = finish(script(tmp_path, FUNCTION_IN_MAIN))
    assert code == 1
    assert err.endswith("ValueError: function is defined in the script that runs; ranks need it in a module\n")


def test_function_of_a_module_that_runs_by_name(tmp_path: Path) -> None:
    process = script(tmp_path, FUNCTION_IN_MAIN, sys.executable, "-m", "script", cwd=tmp_path)
    assert finish(process) == (0, "[7]\n", "")


HELD = """
import sys
from ranks import hold
from shardiff.ranks.torch_pool import workers
try:
    with workers(2, "cpu") as pool:
        pool.call(hold, on_progress=lambda rank, pid: print(pool.starter.pid, pid, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how, stopped", [(signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGINT, True)])
def test_nothing_outlives_the_caller(tmp_path: Path, how: signal.Signals, stopped: bool) -> None:
    process = script(tmp_path, HELD)
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
    assert len(set(pids)) == 3
    if stopped:
        os.kill(pids[-1], signal.SIGSTOP)
    os.killpg(process.pid, how)
    assert finish(process) == (130 if how == signal.SIGINT else -how, "", "")
    assert_gone(pids)
    assert list((tmp_path / "tmp").iterdir()) == []


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def test_torchrun_is_honoured(tmp_path: Path) -> None:
    """Twice, because its processes stay."""
    text = """
import sys
from ranks import rank_sum
from shardiff.ranks.torch_pool import run_on_ranks
results = [run_on_ranks(rank_sum, world_size=2, device="cpu") for _ in range(2)]
sys.stdout.write(f"{results}\\n")
"""
    code, out, err = finish(script(tmp_path, text, *TORCHRUN))
    assert code == 0, err
    assert out == "[[(0, 1.0), (1, 1.0)], [(0, 1.0), (1, 1.0)]]\n" * 2


def test_torchrun_with_another_number_of_processes(tmp_path: Path) -> None:
    code, _, err = finish(script(tmp_path, PLAIN.replace("size=2", "size=3"), *TORCHRUN))
    assert code != 0 and "ValueError: the run needs 3 ranks, torchrun started 2" in err
