"""The calls of all ranks on a time axis, as Perfetto and chrome://tracing read it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardiff.tracing.calls import Call, describe


def as_perfetto(ranks: Sequence[Sequence[Call]]) -> str:
    """A process for each rank. A call that was waited for is a span, from when it was made until then; another, whose
    end cannot be seen, is an instant, and so is the end of a step. Times are in microseconds from the first call."""
    start = min((call.time for calls in ranks for call in calls), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, calls in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        ends = {call.of: call.time for call in calls if call.op == "wait"}
        for i, call in enumerate(calls):
            if call.op == "wait" or (call.op == "mark" and call.detail not in ("optimizer", "step")):
                continue
            name = "end of a step" if call.op == "mark" else call.op
            event: dict[str, Any] = {"name": name, "pid": rank, "tid": call.group or "steps", "cat": call.phase}
            event["ts"] = round((call.time - start) * 1e6, 1)
            event["args"] = {"call": describe(call), "payload_bytes": call.payload_bytes} if call.op != "mark" else {}
            if i in ends:
                event |= {"ph": "X", "dur": round((ends[i] - call.time) * 1e6, 1)}
            else:
                event |= {"ph": "i", "s": "t"}
            events.append(event)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
