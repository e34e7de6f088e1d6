"""Which gradients are sent together: the rule of the flat buckets of data_parallel, on sizes alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

BUCKET_BYTES = 10 << 20  # two w of the default model: one such bucket is sent while the next layers compute


def bucketed(sizes: Sequence[int], kinds: Sequence[Hashable] = (), limit: int = BUCKET_BYTES) -> list[list[int]]:
    """Indices of tensors in buckets of about `limit` bytes, in the order in which their last tensor becomes ready.

    sizes: bytes, in the order in which the tensors become ready. kinds: of each tensor; a bucket has one (a dtype). A
    tensor that fills a bucket has it to itself. Small tensors before and after it still share a bucket.
    """
    found: list[list[int]] = []
    open_bucket: list[int] = []
    room = limit
    for i, size in enumerate(sizes):
        if size >= limit:
            found.append([i])
            continue
        if open_bucket and (size > room or (kinds and kinds[i] != kinds[open_bucket[0]])):
            found.append(open_bucket)
            open_bucket, room = [], limit
        open_bucket.append(i)
        room -= size
    return [*found, open_bucket] if open_bucket else found
