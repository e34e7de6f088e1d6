"""A pool of JAX ranks: results by rank, one transport, failures in the rank's own words, and nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.pools import collectives_of
from shardiff.ranks.jax_pool import workers
from shardiff.ranks.rank import report_progress, this_rank
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.verdict import WorkerError
from shardiff.system.network import held_port


def total_of(value: float) -> tuple[int, int, int, float, str]:
    """(rank, devices of all ranks, own devices, the ranks' sum of value + rank, XLA's threads)."""
    import jax
    import numpy as np

    mesh, x = on_all(np.full(1, value + jax.process_index(), np.float32))
    total = jax.jit(summed(mesh, lambda x: x))(x)
    total = float(np.asarray(total.addressable_shards[0].data)[0])
    report_progress(total)
    print("a rank prints", end=" ", flush=True)
    print("this on standard error", file=sys.stderr)
    return jax.process_index(), jax.device_count(), jax.local_device_count(), total, os.environ["NPROC"]


def on_all(own: Any) -> tuple[Any, Any]:
    """A mesh of all ranks, and an array whose part on this rank is `own`."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    return mesh, jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), own)


def summed(mesh: Any, function: Any) -> Any:
    """A function called `doubled`: the given function on every rank, summed over the ranks."""
    import jax
    from jax.sharding import PartitionSpec as P

    def doubled(x: Any) -> Any:
        return jax.lax.psum(function(x), "x")

    return jax.shard_map(doubled, mesh=mesh, in_specs=P("x"), out_specs=P())


def looked_at() -> tuple[list[str], tuple[int, int, str, str], set[str]]:
    """What this rank notes, while a program is compiled and when it has run twice; and where it listens."""
    import jax
    import numpy as np

    mesh, x = on_all(np.zeros(1, np.float32))
    phases: list[str] = []
    this = this_rank()
    assert this is not None
    note, this.notes.phase = this.notes.phase, lambda phase: phases.append(phase) or note(phase)
    program = jax.jit(summed(mesh, lambda x: 2 * x)).lower(x).compile()
    jax.block_until_ready([program(x), program(x)])
    connections = psutil.Process().net_connections()
    return list(phases), this.notes.last_call(), {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def fail_in(rank: int, how: str) -> None:
    """Fail in one rank, while the others wait for it in a collective or for nothing."""
    import jax

    if jax.process_index() == rank:
        if how == "raise":
            raise KeyError("its own error")
        if how == "sleep":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        time.sleep(600)
    total_of(1)


def sleep() -> None:
    time.sleep(600)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "shardiff.ranks.jax_rank" in " ".join(p.cmdline())]


def failure(pool: Workers, *how: Any) -> WorkerError:
    """The error of a call of fail_in, after which no process of the pool is running."""
    before, others = time.monotonic(), len(children()) - pool.world_size
    with pytest.raises(WorkerError) as caught:
        pool.call(fail_in, *how)
    assert time.monotonic() - before < 30
    assert len(children()) == others
    return caught.value


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[Workers, Workers]]:
    with workers(2, threads=3, describe=collectives_of) as one, workers(2) as other:
        yield one, other
    assert children() == []


def test_two_pools_at_once_give_results_by_rank_from_processes_of_one_device_each(
    pools: tuple[Workers, Workers],
) -> None:
    one, other = pools
    seen: list[tuple[int, float]] = []
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.call, total_of, 10, on_progress=lambda *said: seen.append(said))
        second = threads.submit(other.call, total_of, 100)
    assert first.result() == [(0, 2, 1, 21.0, "3"), (1, 2, 1, 21.0, "3")]
    assert [result[3] for result in second.result()] == [201.0, 201.0]
    assert sorted(seen) == [(0, 21.0), (1, 21.0)]
    for phases, call, addresses in one.call(looked_at):
        assert phases == ["compile", "call", "run", "run"]
        assert call == (2, 4, "jit_doubled", "1 all_reduce")
        assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    assert [call for _, call, _ in other.call(looked_at)] == [(2, 0, "jit_doubled", "collectives unknown")] * 2


def test_failures_name_the_rank_with_its_own_words_and_the_pool_starts_anew(
    pools: tuple[Workers, Workers], capfd: pytest.CaptureFixture[str]
) -> None:
    for pool, rank in zip(pools, (0, 1), strict=True):  # rank 0 has the others' coordinator
        died = failure(pool, rank, "die")
        assert (died.rank, died.kind) == (rank, "died")
        assert str(died).startswith(f"rank {rank} of 2 died in phase call: killed by SIGKILL")
    one, other = pools
    assert [result[3] for result in one.call(total_of, 20)] == [41.0, 41.0]
    assert [result[3] for result in other.call(total_of, 30)] == [61.0, 61.0]
    raised = failure(one, 1, "raise")
    assert (raised.rank, raised.kind, raised.phase) == (1, "raised", "call")
    assert str(raised).startswith("rank 1 of 2 raised in phase call:\n\nTraceback")
    assert Path(__file__).name in raised.traceback.splitlines()[1]  # from the function on
    assert "in fail_in" in raised.traceback and raised.traceback.endswith("KeyError: 'its own error'\n")
    other.timeout = 1
    stuck = failure(other, 1, "sleep")
    assert str(stuck).startswith("rank 1 of 2 is stuck in phase call: no sign of life")
    assert "in fail_in" in stuck.traceback and "rank 0 of 2, in phase call, waits for others" in str(stuck)
    assert capfd.readouterr() == ("a rank prints " * 4, "")


def test_ranks_end_with_the_caller() -> None:
    code = "from shardiff.ranks.jax_pool import workers\n"
    code += "from shared_tests.tool.test_jax_launch import sleep\n"
    code += "with workers(2) as pool: pool.call(sleep)"
    process = subprocess.Popen([sys.executable, "-c", code])
    while len(ranks := psutil.Process(process.pid).children()) < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert psutil.wait_procs(ranks, timeout=20)[1] == []


def test_a_held_port_is_given_to_nobody_else() -> None:
    with held_port() as port, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))


def test_wrong_arguments_are_refused_with_the_number(pools: tuple[Workers, Workers]) -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"), workers(0):
        pass
    with pytest.raises(ValueError, match="unknown device 'tpu'; known: cpu, cuda"), workers(1, "tpu"):
        pass
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"), workers(1, threads=0):
        pass
    with pytest.raises(ValueError, match="a pool of 2 cannot run 1"):
        pools[0].call(sleep, world_size=1)
