"""Where torchrun has started the processes: they find each other through its store."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shardiff.system import torchrun
from shardiff.tracing.calls import Call


def under_torchrun() -> torchrun.Started | None:
    """This process's place among those that torchrun started, which have a store that they can all reach; else None.

    Raises ValueError, one line, for variables of torchrun's that cannot be.
    """
    here = torchrun.started()
    return here if here and here.has_store else None


def torchruns_store(seconds: float) -> Any:
    """The store that all of torchrun's processes can reach; it waits so long for what is not there."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))


def shared(address: str) -> str:
    """The verifier's address, which rank 0 has and gives to all."""
    store = torchruns_store(60)
    if address:
        store.set("shardiff/verifier", address)
    return store.get("shardiff/verifier").decode()


def exchange(mine: Sequence[Sequence[Call]], num_ranks: int, seconds: float = 60) -> list[list[Call]] | None:
    """On rank 0 the calls of all ranks, by way of torchrun's store; on the others None.

    A rank whose calls do not come within this time is said to be missing, and has none.
    """
    from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage]

    rank, store = int(os.environ["RANK"]), torchruns_store(seconds)
    store.set(f"shardiff/{rank}", json.dumps([call.to_json() for calls in mine for call in calls]))
    if rank:
        return None
    ranks: list[list[Call]] = []
    for other in range(num_ranks):
        try:
            ranks.append([Call.from_json(fields) for fields in json.loads(store.get(f"shardiff/{other}"))])
        except DistStoreError:
            print(f"shardiff: nothing came from rank {other}", file=sys.stderr)
            ranks.append([])
    return ranks
