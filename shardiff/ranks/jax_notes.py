"""What a rank notes while it works: the compiled program that it runs, and whether it compiles or runs.

A step of JAX is one program, and XLA alone knows how far it has come. What can be told of it is its name, the number of
the call, counted over all programs of the rank, and which collectives it holds, read once from its text when it is
compiled. Takes a microsecond a call. Seen are programs that are compiled ahead of time, `jit(f).lower(...).compile()`,
as everything is that we measure; not those that a call of `jit(f)` compiles and runs. A program is noted when it is
started, not when it has ended. Forward, backward and update are not told apart: they are one program.

The phases: "compile", "run" from the first program on that is started, else "call".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from shardiff import hlo

Tell = Callable[[int, int, bytes, bytes], None]  # number of the call, payload bytes, program, its collectives
UNKNOWN = 0, b"a program", b"collectives unknown"


def watch(tell: Tell, report_phase: Callable[[str], None]) -> None:
    """Tell of every program and phase from now on, for good. For processes that are ranks."""
    programs: dict[int, tuple[int, bytes, bytes]] = {}  # by id: programs have no room for more, and stay
    compile, call = jax.stages.Lowered.compile, jax.stages.Compiled.__call__
    number = 0

    def noted_compile(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        report_phase("compile")
        compiled = compile(lowered, *args, **kwargs)
        programs[id(compiled)] = describe(compiled)
        report_phase("call")
        return compiled

    def noted_call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        tell(number, *programs.get(id(compiled), UNKNOWN))
        report_phase("run")
        return call(compiled, *args, **kwargs)

    jax.stages.Lowered.compile, jax.stages.Compiled.__call__ = noted_compile, noted_call


def describe(compiled: Any) -> tuple[int, bytes, bytes]:
    """Payload bytes of all its collectives, its name, and how many there are of each op."""
    text, records = compiled.as_text() or "", []
    with suppress(ValueError):
        records = hlo.read(text).records
    size = sum(record.payload_bytes * (record.executions.max or 1) for record in records)
    ops = Counter(record.op for record in records)
    name = re.match(r"HloModule ([^,\s]+)", text)
    held = ", ".join(f"{count} {op}" for op, count in ops.items()) or "no collectives"
    return size, (name[1] if name else "a program").encode(), held.encode()
