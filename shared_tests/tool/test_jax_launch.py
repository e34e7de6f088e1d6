"""JAX rank processes: results by rank, one transport, failures told with the rank's own words, nothing left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from shardiff.ranks import jax_rank as worker
from shardiff.ranks.jax_pool import WorkerError, held_port, run_on_ranks, workers
from shardiff.ranks.processes import CALL, PHASE


def total_of(value):
    """(rank, devices of all ranks, own devices, the ranks' sum of value + rank, XLA's threads)."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    own = np.full(1, value + jax.process_index(), np.float32)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), own)
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))(x)
    total = float(np.asarray(total.addressable_shards[0].data)[0])
    print("a rank prints", end=" ", flush=True)
    print("this on standard error", file=sys.stderr)
    return jax.process_index(), jax.device_count(), jax.local_device_count(), total, os.environ["NPROC"]


def listening():
    """Addresses at which this rank listens."""
    return [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]


def noted():
    """What this rank has noted: while a program is compiled, and when it has run twice."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("x")), np.zeros(1, np.float32))

    def doubled(x):
        return jax.lax.psum(2 * x, "x")

    mapped = jax.shard_map(doubled, mesh=mesh, in_specs=P("x"), out_specs=P())
    phases = []
    this = worker._this_rank
    note, this.notes.phase = this.notes.phase, lambda phase: phases.append(phase) or note(phase)
    program = jax.jit(mapped).lower(x).compile()
    jax.block_until_ready([program(x), program(x)])
    number, size, what, whom = CALL.unpack_from(this.notes.memory, this.notes.start + PHASE.size)
    return list(phases), number, size, what.rstrip(b"\0").decode(), whom.rstrip(b"\0").decode()


def fail_in(rank, how):
    """Fail in one rank, while the others wait for it in a collective or for nothing."""
    import jax

    if jax.process_index() == rank:
        if how == "raise":
            raise KeyError("its own error")
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        time.sleep(600)
    total_of(1)


def sleep_in_one(seconds):
    import jax

    time.sleep(seconds if jax.process_index() else 0)


def children():
    return [p for p in psutil.Process().children() if "shardiff.ranks.jax_rank" in " ".join(p.cmdline())]


def test_results_come_by_rank_from_processes_of_one_device_each(capfd):
    with workers(2, threads=3) as pool:
        assert pool.call(total_of, 10) == [(0, 2, 1, 21.0, "3"), (1, 2, 1, 21.0, "3")]
        assert [result[3] for result in pool.call(total_of, 20)] == [41.0, 41.0]
        for addresses in pool.call(listening):  # on the loopback interface only
            assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        for phases, *call in pool.call(noted):
            assert phases == ["compile", "call", "run", "run"]
            assert call == [2, 4, "jit_doubled", "1 all_reduce"]
    out, err = capfd.readouterr()
    assert out == "a rank prints " * 4
    assert err == ""
    assert children() == []


def test_two_at_once_do_not_meet():
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(run_on_ranks, total_of, value, world_size=2) for value in (1, 100)]
        assert [run.result()[0][3] for run in runs] == [3.0, 201.0]


def test_a_rank_that_raises_is_named_with_its_own_traceback_first(capfd):
    with pytest.raises(WorkerError) as caught:
        run_on_ranks(fail_in, 1, "raise", world_size=2)
    error = caught.value
    assert (error.rank, error.kind, error.phase) == (1, "raised", "call")
    assert str(error).startswith("rank 1 of 2 raised in phase call:\n\nTraceback")
    assert "in fail_in" in error.traceback and error.traceback.endswith("KeyError: 'its own error'\n")
    assert capfd.readouterr() == ("", "")
    assert children() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_and_the_others_end_within_seconds(rank, capfd):
    with workers(2) as pool:
        pool.call(sleep_in_one, 0)  # started
        began = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            pool.call(fail_in, rank, "die")
    assert time.monotonic() - began < 30
    assert (caught.value.rank, caught.value.kind) == (rank, "died")
    assert str(caught.value).startswith(f"rank {rank} of 2 died in phase call: killed by SIGKILL")
    assert capfd.readouterr() == ("", "")
    assert children() == []


def test_a_rank_that_is_stuck_is_named_with_where_it_is():
    with workers(2) as pool:
        pool.call(sleep_in_one, 0)
        pool.timeout = 1
        with pytest.raises(WorkerError, match="rank 1 of 2 is stuck in phase call: no sign of life") as caught:
            pool.call(sleep_in_one, 600)
    assert "in sleep_in_one" in caught.value.traceback
    assert children() == []


def test_ranks_end_with_the_caller():
    code = "from shardiff.ranks.jax_pool import run_on_ranks; "
    code += "from shared_tests.tool.test_jax_launch import sleep_in_one as f; "
    process = subprocess.Popen([sys.executable, "-c", code + "run_on_ranks(f, 600, world_size=2)"])
    while len(ranks := psutil.Process(process.pid).children()) < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert psutil.wait_procs(ranks, timeout=20)[1] == []


def test_a_held_port_is_given_to_nobody_else():
    with held_port() as port, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("127.0.0.1", port))


def test_wrong_arguments_are_refused_with_the_number():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        run_on_ranks(total_of, world_size=0)
    with pytest.raises(ValueError, match="unknown device 'tpu'; known: cpu, cuda"):
        run_on_ranks(total_of, world_size=1, device="tpu")
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        run_on_ranks(total_of, world_size=1, threads=0)
