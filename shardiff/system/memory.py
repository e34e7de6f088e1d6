"""The memory of this machine, and refusals of work that exceeds it."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path

import psutil

from shardiff.system.words import size

PROCESS = 20 * 10**6  # bytes that a rank process has to itself, at least
UNLIMITED = 2**60  # how cgroup v1 says that there is no limit: the largest number of pages, in bytes


def available(root: Path = Path("/")) -> int:
    """Bytes of memory that are available here, or within the limit of a container. root: of the file system."""
    return max(0, min([psutil.virtual_memory().available, *cgroup_rests(root)]))


def address_space() -> int:
    """Bytes that this process alone may still take: what is available, or less under `ulimit -v`."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    rest = available()
    return rest if limit == resource.RLIM_INFINITY else max(0, min(rest, limit - psutil.Process().memory_info().vms))


def cgroup_rests(root: Path) -> Iterable[int]:
    """What each cgroup (v1 or v2) around this process leaves of its limit. Pages that only cache files are free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            base, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):  # inside a container only the last, the root, may be visible
            try:
                at = root / base / group
                most, used = (at / limit).read_text().strip(), int((at / usage).read_text())
                stat = dict(one.split() for one in (at / "memory.stat").read_text().splitlines())
                if most != "max" and int(most) < UNLIMITED:
                    yield int(most) - used + int(stat.get(cache, 0))
            except (OSError, ValueError):
                continue


def require(needed: int, what: str) -> None:
    """Raises ValueError, in one line, if more bytes are needed than are available. what: what needs them."""
    if needed > (there := available()):
        raise ValueError(
            f"{what} needs at least {size(min(needed, 10**30))} of memory, but only {size(there)} is available"
        )
