"""What `torch_pool`, the caller's side, starts: one process that imports torch, and the ranks that it forks."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from shardiff.ranks.messages import receive, send
from shardiff.ranks.rank import Rank, note_call, report_phase, run
from shardiff.system.machine import threads
from shardiff.system.processes import adopt_orphans, nameless_file, when_parent_ends

if TYPE_CHECKING:
    import torch

BEFORE_FORK = "BEFORE_FORK"  # a module's tuple of names: see `workers`
MAX_RANKS = 250  # file descriptors that one message can carry
SECONDARY = ("gloo", "NCCL", "onnection", "Broken pipe", "remote process")  # in errors that another may have caused


@dataclass
class Job:
    """The ranks of one call. notes, store: paths of files; module: that of the function they will be asked to call.

    num_gpus: that the ranks use, in turn; 0 for the CPU. staged: see `init_group`.
    """

    world_size: int
    num_gpus: int
    staged: bool
    notes: Path
    store: Path
    timeout: float
    module: str | None


def start_ranks() -> NoReturn:
    """The starter: import torch, then do what standard input, a socket, asks for until the caller is gone.

    The first message says whether to count GPUs. Then "gpus" is answered by their number; a Job, which comes with a
    socket for each rank, by the ranks' process ids; a list that says which ranks are gone, by the states of all, which
    have then been ended.
    """
    caller = os.getppid()
    when_parent_ends(signal.SIGCONT)  # should it be stopped when the caller ends, it goes on, to end all
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # the caller may have no standard output or error: nothing else may take their numbers
    control = socket.socket(fileno=os.dup(0))
    os.dup2(null, 0)
    pids, failure, num_gpus = [], "", 0
    try:
        count_gpus = receive(control)
        try:
            num_gpus = _import_torch(count_gpus)
        except Exception:
            failure = traceback.format_exc()
        while os.getppid() == caller:
            if not select.select([control], [], [], 1)[0]:
                continue
            first, fds, _, _ = socket.recv_fds(control, 1, MAX_RANKS)
            if not first:
                break
            request = receive(control)
            if isinstance(request, Job):
                _import_before_fork(request.module or "builtins", bool(num_gpus))
                answer = pids = _fork(request, control, [socket.socket(fileno=fd) for fd in fds])
            elif request == "gpus":
                answer = num_gpus
            else:
                pids, answer = [], _end(pids, request)
            send(control, (failure, answer))
    finally:
        _end(pids, [False] * len(pids))
        os._exit(0)


def _import_torch(count_gpus: bool) -> int:
    """Import what every rank needs; the number of GPUs."""
    importlib.import_module("torch.distributed.device_mesh")
    num_gpus = _count_gpus() if count_gpus else 0
    import_for_good("shardiff.ranks.torch_notes").watch(note_call, report_phase)
    return num_gpus


def _import_before_fork(name: str, has_gpus: bool) -> None:
    """Import the module of the function that is called, and what it says that its functions import when they run."""
    with suppress(BaseException), no_new_cache():  # a rank meets the same error, and shows it
        late = getattr(import_for_good(name), BEFORE_FORK, ())
        for other in () if has_gpus else late:
            import_for_good(other)


def import_for_good(name: str) -> Any:
    """Import a module and keep all objects that exist then from the garbage collector.

    It would go through them in every rank, and thereby copy the pages that ranks share, which takes longer than many a
    call.
    """
    known = name in sys.modules
    module = importlib.import_module(name)
    if not known:
        gc.collect()
        gc.freeze()
    return module


@contextmanager
def no_new_cache() -> Iterator[None]:
    """torch._dynamo makes a directory when imported, for what it may compile later. Have it take one that exists."""
    ours = "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    if ours:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.sep
    yield
    if ours:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]


def _count_gpus() -> int:
    """The number of GPUs, found in another process: CUDA, once initialized, does not survive a fork."""
    import torch

    if not (pid := _quiet_fork()):
        try:
            os._exit(min(torch.cuda.device_count(), MAX_RANKS))
        finally:
            os._exit(0)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _fork(job: Job, control: socket.socket, sockets: list[socket.socket]) -> list[int]:
    """Start the ranks; their pids."""
    pids, starter = [], os.getpid()
    for rank, sock in enumerate(sockets):
        sock.set_inheritable(False)
        pids.append(_quiet_fork())
        if not pids[-1]:
            try:
                control.close()
                for other in sockets[rank + 1 :]:
                    other.close()
                when_parent_ends(signal.SIGKILL)
                if os.getppid() == starter:
                    run(Rank(rank, sock, job.notes, waits, _leave), lambda this: _work(this, job), SECONDARY)
            finally:
                os._exit(1)
        sock.close()
    return pids


def _quiet_fork() -> int:
    """Libraries warn that none of their threads are in a fork. Ranks start their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _end(pids: Sequence[int], gone: Sequence[bool]) -> list[int | str | None]:
    """End the ranks. Their states before: exit code, negative for a signal; "stopped"; None for running."""
    states: list[int | str | None] = []
    for pid, exiting in zip(pids, gone, strict=True):
        until, changed, status = time.monotonic() + 5 * exiting, 0, 0
        while not changed:
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if time.monotonic() > until:
                break
            time.sleep(0 if changed else 0.002)
        exited = not os.WIFSTOPPED(status)
        states.append((os.waitstatus_to_exitcode(status) if exited else "stopped") if changed else None)
    alive = [pid for pid, state in zip(pids, states, strict=True) if not isinstance(state, int)]
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)
    with suppress(ChildProcessError):  # raised when none is left
        while True:  # what ranks had started is this process's child since they are gone
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for child in psutil.Process().children():
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                time.sleep(0.002)
    return states


def _leave() -> NoReturn:
    """The caller or the starter is gone; the latter has ended what this rank has started, or is ended with it."""
    os._exit(1)


def _work(this: Rank, job: Job) -> None:
    """A rank: call the function in a process group, send the result, and go when all ranks have theirs."""
    faulthandler.enable(this.socket.fileno(), all_threads=False)  # the caller takes what is no message as last words
    import torch
    import torch.distributed as dist

    function, args = this.next_call()
    device = torch.device("cuda", this.rank % job.num_gpus) if job.num_gpus else torch.device("cpu")
    if not os.environ.get("OMP_NUM_THREADS"):  # which torch has read itself
        torch.set_num_threads(threads(job.world_size))
    this.report_phase("rendezvous")
    store = dist.FileStore(str(job.store), job.world_size)  # pyright: ignore[reportPrivateImportUsage]
    with _stderr_in_notes():
        init_group(device, job.timeout + 300, job.staged, store=store, rank=this.rank, world_size=job.world_size)
    this.report_phase("start-up")
    this.answer(function(device, *args))
    this.released.wait()  # a rank that closes its connections early would disturb those that still use them
    dist.destroy_process_group()


@contextmanager
def _stderr_in_notes() -> Iterator[None]:
    """Make standard error part of the error, if there is one: when a rank dies, gloo logs it in all others."""
    saved = os.dup(2)
    with ExitStack() as stack, open(nameless_file(stack), "w+b") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except Exception as error:
            file.seek(0)
            error.add_note(file.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def init_group(device: torch.device, timeout: float, staged: bool = False, **rendezvous: Any) -> None:
    """The default process group: gloo on CPU, NCCL on CUDA. timeout: seconds that a collective may take.

    staged: through the host's memory instead, as ranks must that share a GPU (`torch_staged`).
    """
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if staged:
        from shardiff.ranks import torch_staged

        torch_staged.register()
        dist.init_process_group(torch_staged.NAME, timeout=limit, **rendezvous)
    elif device.type == "cuda":
        dist.init_process_group("nccl", timeout=limit, device_id=device, **rendezvous)
    else:
        dist.init_process_group("gloo", timeout=limit, **rendezvous)


def waits(stack: str) -> bool:
    """Whether the stack is that of a thread that waits for other ranks, or is in C++ where it may."""
    return "distributed_c10d.py" in stack or ".wait(" in stack or "run_backward(" in stack.splitlines()[-1]
