"""What a JAX rank notes while it works: the compiled program that it runs, and whether it compiles or runs.

A step of JAX is one program, and XLA alone knows how far it has come. What can be noted is the program's name, the
number of the call, counted over all programs of the rank, and which collectives the program has, read once from its
text when it is compiled. A call costs a microsecond. It sees programs that are compiled ahead of time, by
`jit(f).lower(...).compile()`, as everything that we measure is; it does not see those that a call of `jit(f)` compiles
and runs. A program is noted when it is started, not when it has ended. Forward, backward and update are one program,
and are not told apart.

The phases: "compile"; "run" once a program has been started; otherwise "call".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax

from shardiff.ranks.notes import Describe

Tell = Callable[[int, int, bytes, bytes], None]  # number of the call, payload bytes, program, its collectives
UNKNOWN = 0, b"a program", b"collectives unknown"


def watch(tell: Tell, report_phase: Callable[[str], None], describe: Describe | None) -> None:
    """Tell of every program and phase from now on, for good. For processes that are ranks.

    describe: what to say of a program's collectives, given its text; without it they are unknown."""
    programs: dict[int, tuple[int, bytes, bytes]] = {}  # by id: a program takes no attributes, and is kept
    compile, call = jax.stages.Lowered.compile, jax.stages.Compiled.__call__
    number = 0

    def noted_compile(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        report_phase("compile")
        compiled = compile(lowered, *args, **kwargs)
        programs[id(compiled)] = noted(compiled, describe)
        report_phase("call")
        return compiled

    def noted_call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        tell(number, *programs.get(id(compiled), UNKNOWN))
        report_phase("run")
        return call(compiled, *args, **kwargs)

    setattr(jax.stages.Lowered, "compile", noted_compile)
    setattr(jax.stages.Compiled, "__call__", noted_call)


def noted(compiled: Any, describe: Describe | None) -> tuple[int, bytes, bytes]:
    """Payload bytes of all of a program's collectives, the program's name, and its collectives in words."""
    text = compiled.as_text() or ""
    name = re.match(r"HloModule ([^,\s]+)", text)
    size, held = describe(text) if describe else (UNKNOWN[0], UNKNOWN[2].decode())
    return size, (name[1] if name else "a program").encode(), held.encode()
