"""A rank of a lab: it meets the others, and runs the functions that it is asked for until the lab is gone."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from shardiff.system.processes import when_parent_ends


def ready() -> int:
    """This rank's number, once all have met."""
    dist.barrier()
    return dist.get_rank()


def main(caller: Connection) -> None:
    """Answer requests, (module, function, arguments), with ("done", result) or ("error", traceback)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="env://")
    while True:
        try:
            module, name, args = caller.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = "done", getattr(importlib.import_module(module), name)(*args)
        except Exception:
            answer = "error", traceback.format_exc(limit=-3)
        caller.send(answer)


if __name__ == "__main__":
    when_parent_ends(signal.SIGKILL)
    main(Connection(int(sys.argv[1])))
