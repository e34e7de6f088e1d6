"""Put on PYTHONPATH, where Python runs it first in every process: it plants the fault that SHARDIFF_FAULT describes.

See `shared_tests.tool.injections`. It wraps the one method by which ranks note their phase, and what starts ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time

fault = json.loads(os.environ["SHARDIFF_FAULT"])
os.environ.setdefault("SHARDIFF_FAULT_COMMAND", str(os.getpid()))  # the first process of all is the command


def fail():
    """Fail as the fault says, once in all processes."""
    try:
        with open(fault["fired"], "x") as file:  # once
            file.write(str(time.monotonic()))
    except FileExistsError:
        return
    how = fault["how"]
    if fault["target"] == "command":
        os.kill(int(os.environ["SHARDIFF_FAULT_COMMAND"]), signal.Signals[how])
        how = "sleep"
    if fault["target"] in ("rank", "command"):
        subprocess.Popen(["sleep", "3600"])
    if how == "raise":
        raise ValueError("the planted error")
    if how == "memory":
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
        hog: list[bytearray] = []
        try:
            while len(hog) < 1000:
                hog.append(bytearray(1 << 23))
        finally:
            hog.clear()  # for the traceback to be made
    elif how == "exit 0":
        os._exit(0)
    elif how == "sleep":
        time.sleep(3600)
    else:
        os.kill(os.getpid(), signal.Signals[how])


def after(owner, name, where):
    """Have the function fail when `where` says so, after it has done its work."""
    original, seen = getattr(owner, name), []

    def function(*args):
        result = original(*args)
        if where(*args):
            seen.append(None)
            if len(seen) == fault["time"]:
                fail()
        return result

    setattr(owner, name, function)


if fault["target"] in ("rank", "command"):
    from shardiff.ranks import notes

    ranks = {"torch": "shardiff.ranks.torch_starter", "jax": "shardiff.ranks.jax_rank"}[fault["framework"]]
    after(
        notes.Notes,
        "phase",
        lambda own, phase: ranks in sys.modules and (own.start // notes.SIZE, phase) == (fault["rank"], fault["phase"]),
    )
elif fault["target"] == "starter" and "start_ranks" in " ".join(sys.orig_argv):
    if fault["phase"] == "start-up":
        fail()
    from shardiff.ranks import torch_starter

    after(torch_starter, "_fork", lambda *_: True)
elif fault["target"] == "process":
    from contract.problem import Problem

    after(Problem, "parameters", lambda *_: sys._getframe(2).f_globals["__name__"].startswith("jax_impl"))
