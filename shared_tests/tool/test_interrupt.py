"""Ctrl-C ends a command at any moment, quietly, and leaves nothing running."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from shardiff.system.interrupt import deferred_interrupts, reliable_interrupts


def _xla_gc_callback():
    """Like jax's: an exception that is raised here is lost."""
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        pytest.fail(f"raised where it is lost: {error!r}")


def test_an_interrupt_comes_at_once():
    with pytest.raises(KeyboardInterrupt), reliable_interrupts():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")


def test_an_interrupt_in_a_callback_that_would_swallow_it_comes_a_moment_later():
    with pytest.raises(KeyboardInterrupt), reliable_interrupts():
        _xla_gc_callback()
        time.sleep(10)
        pytest.fail("went on")


def test_a_deferred_interrupt_comes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), reliable_interrupts(), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("block")
    assert done == ["block"]


def test_an_ignored_interrupt_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with reliable_interrupts(), deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def jax_starts(process: psutil.Process) -> bool:
    return any("jaxlib" in library.path for library in process.memory_maps())


def torch_ranks_work(process: psutil.Process) -> bool:
    for child in process.children():
        with suppress(psutil.NoSuchProcess):  # the command starts others that end soon
            if child.children():
                return True
    return False


LATER = pytest.param(torch_ranks_work, "torch", marks=pytest.mark.long)


@pytest.mark.parametrize("reached, implementations", [(jax_starts, "torch,annotated"), LATER])
def test_an_interrupted_check_is_quiet_and_leaves_no_process(reached, implementations):
    """jax starts while the process that starts torch's ranks imports torch."""
    command = [sys.executable, "-m", "shardiff", "check", "--width", "8", "--steps", "1000"]
    command += [word for name in implementations.split(",") for word in ("--implementation", name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            watched = psutil.Process(process.pid)
            while not reached(watched):
                assert process.poll() is None
                time.sleep(0.05)
            children = watched.children(recursive=True)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30) == ("", "")
            assert process.returncode == 130
            assert psutil.wait_procs(children, timeout=10)[1] == []
        finally:
            process.kill()
