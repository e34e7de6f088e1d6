"""What torch itself says a program calls: CommDebugMode's counts, and the profiler's records of what gloo ran."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from shardiff.tracing.calls import NO_CALLS, Call

# The names of an op in any of torch's spellings, the longer ones first: a reduce_scatter is no reduce.
WORDS = {
    "reduce_?scatter": "reduce_scatter",
    "all_?reduce": "all_reduce",
    "all_?gather": "all_gather",
    "all_?to_?all": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
UNSEEN = ("send", "recv", "barrier")  # by CommDebugMode

# A call is done for its caller before gloo's thread has closed its record. Where a profile ends in between, torch 2.13
# crashes, in five of six runs of 24 profiles.
SETTLED = 0.1  # seconds


def traced(calls: list[Call]) -> Counter[str]:
    """The calls that shardiff has traced on a rank, by op."""
    return Counter(call.op for call in calls if call.op not in NO_CALLS)


def by_comm_debug_mode(run: Callable[[], object]) -> Counter[str]:
    """The calls that CommDebugMode counts while a function runs, by op."""
    mode = CommDebugMode()
    # Its tracker of modules adds a hook to a module each time it runs, and fails in the second step; nobody asks it.
    ignored: dict[str, Any] = dict.fromkeys(("_fw_pre_hook", "_fw_post_hook", "_bw_hook"), lambda *_: None)
    vars(mode.advanced_module_tracker).update(ignored)
    with mode:
        run()
    counts: Counter[str] = Counter()
    for operator, count in mode.get_comm_counts().items():
        counts[op_of(str(operator))] += count
    return counts


def by_profiler(run: Callable[[], object]) -> Counter[str]:
    """The collectives and messages that gloo ran while a function runs, by op, from the profiler's `gloo:` records."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
        time.sleep(SETTLED)
    return Counter(op_of(event.name) for event in profiled.events() or () if event.name.startswith("gloo:"))


def op_of(name: str) -> str:
    """gloo:all_reduce, c10d.allreduce_, c10d_functional.all_reduce: all_reduce."""
    for word, op in WORDS.items():
        if re.search(word, name.rpartition(":")[2].rpartition(".")[2]):
            return op
    raise ValueError(f"no op of a collective in {name!r}")


def flaws(calls: list[Call], mode: Mapping[str, int], gloo: Mapping[str, int]) -> list[str]:
    """What a rank's trace says otherwise than torch does, a line each.

    gloo runs a reduce_scatter as an all_reduce of which it keeps a part, and says so; CommDebugMode sees no messages.
    """
    found = traced(calls)
    expected: dict[str, Any] = {op: count for op, count in found.items() if op not in UNSEEN}
    lines = [] if expected == dict(mode) else [f"traced {expected}, CommDebugMode counts {dict(mode)}"]
    as_run = Counter({op: count for op, count in found.items() if op != "reduce_scatter"})
    as_run["all_reduce"] += found["reduce_scatter"]
    if +as_run != Counter(gloo):
        lines.append(f"traced {dict(found)}, gloo ran {dict(gloo)}")
    return lines
