"""What this machine can do without any collective: copy memory, and move bytes over the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from statistics import median
from threading import Barrier, Thread
from time import perf_counter
from typing import Any

import numpy as np

from shardiff.system.network import LOOPBACK

CHUNK = 1 << 20  # bytes of one send


def floor(streams: Sequence[int], payload: int = 64 << 20, repeats: int = 5) -> dict[str, Any]:
    """GB/s, GB = 1e9 bytes, medians of `repeats`.

    memory_copy_GBps: bytes copied over time, by one thread; each is read and written. loopback_GBps: of each of so many
    TCP streams over loopback at once, a thread at either end: the ring of n ranks has n. Keys are decimal strings, as
    in JSON.
    """
    return {
        "bytes": payload,
        "memory_copy_GBps": payload / median(copy_seconds(payload, repeats)) / 1e9,
        "loopback_GBps": {
            str(count): payload / median(loopback_seconds(count, payload) for _ in range(repeats)) / 1e9
            for count in sorted({1, *streams})
        },
    }


def copy_seconds(payload: int, repeats: int) -> list[float]:
    """Seconds to copy so many bytes from one array that exists to another."""
    source, target = np.ones(payload, np.uint8), np.zeros(payload, np.uint8)
    seconds = []
    for _ in range(repeats):
        began = perf_counter()
        np.copyto(target, source)
        seconds.append(perf_counter() - began)
    return seconds


def loopback_seconds(streams: int, payload: int) -> float:
    """Seconds until each of `streams` receivers has `payload` bytes from its own sender."""
    ready, ends = Barrier(2 * streams + 1), []
    with socket.create_server((LOOPBACK, 0)) as server:
        for _ in range(streams):
            sender = socket.create_connection(server.getsockname())
            ends.append((sender, server.accept()[0]))
    threads = [Thread(target=_send, args=(sender, payload, ready)) for sender, _ in ends]
    threads += [Thread(target=_receive, args=(receiver, payload, ready)) for _, receiver in ends]
    for thread in threads:
        thread.start()
    ready.wait()
    began = perf_counter()
    for thread in threads:
        thread.join()
    seconds = perf_counter() - began
    for end in (end for pair in ends for end in pair):
        end.close()
    return seconds


def _send(sock: socket.socket, payload: int, ready: Barrier) -> None:
    chunk = memoryview(bytearray(CHUNK))
    ready.wait()
    for start in range(0, payload, CHUNK):
        sock.sendall(chunk[: payload - start])


def _receive(sock: socket.socket, payload: int, ready: Barrier) -> None:
    chunk = bytearray(CHUNK)
    ready.wait()
    while payload > 0 and (count := sock.recv_into(chunk)):
        payload -= count
