"""Which training step the calls of a rank are part of. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from shardiff.tracing.calls import Call

SETUP, REST = 0, -1


def step_of(calls: Sequence[Call]) -> list[int]:
    """For each call of a rank the step that it is part of, from 1 on; SETUP before the first, REST after the last.

    A step ends where the program says so (`shardiff.step`); in a program that never does, where an optimizer's step
    ends, and what further optimizers send directly after it is part of it too. What is sent between two steps counts to
    the second. Without any end of a step all after the set-up is REST.
    """
    marks = [call.detail for call in calls if call.op == "mark"]
    ends = "step" if "step" in marks else "optimizer"
    last = marks.count(ends)
    steps, ended, begun, since = [], 0, False, False
    for call in calls:
        if call.op == "mark":
            begun = begun or call.detail == "begin"
            since = since or call.detail == "begin"
            if call.detail == ends:
                ended, since, begun = ended + 1, False, True
        late = ends == "optimizer" and call.phase == "update" and not since and ended > 0 and call.op != "mark"
        step = ended if late else ended + 1
        steps.append(SETUP if not begun else REST if step > last else step)
    return steps
