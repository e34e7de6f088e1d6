"""Compares a run with a planted mistake in it with the reference."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contract import reference
from contract.strategy import Run
from shared_tests import evidence
from shared_tests.edited import Edit, edited
from shared_tests.meta.mutants.training import RAISES, STUCK, Mutant
from shared_tests.on_ranks import train_edited

STUCK_AFTER = 3.0  # seconds


@dataclass(frozen=True)
class Verdict:
    """claims: those that failed. lines: how they failed, in words."""

    claims: frozenset[str]
    lines: tuple[str, ...]

    def caught(self, mutant: Mutant) -> bool:
        """Whether exactly the claims that the mutant names have failed, and with the words that it names."""
        return self.claims == mutant.claims and mutant.words in "\n".join(self.lines)


def judge(mutant: Mutant, pool: Any, want: Any = None) -> Verdict:
    """Run the mutant and compare it with the reference's result `want`, which is computed if not given."""
    return judge_run(mutant.run, mutant.module, mutant.edits, pool, want, STUCK in mutant.claims)


def judge_run(
    run: Run, module: str, edits: Sequence[Edit], pool: Any, want: Any = None, hangs: bool = False
) -> Verdict:
    """Like `judge`, for a run with any edits of a module, or with none."""
    try:
        got = run_edited(run, module, edits, pool, hangs)
    except Exception as error:
        kind = STUCK if getattr(error, "kind", "") == "stuck" else RAISES
        return Verdict(frozenset({kind}), (str(error),))
    lines = evidence.failures(run, got, want or reference.run(run))
    return Verdict(frozenset(line.partition(":")[0] for line in lines), tuple(lines))


def run_edited(run: Run, module: str, edits: Sequence[Edit], pool: Any, hangs: bool = False) -> Any:
    """The result of a run with an edited module, in worker processes (torch) or in this one (JAX)."""
    if run.implementation != "torch":
        with edited(module, edits):
            return importlib.import_module("jax_impl.train").run(run)
    from torch_impl import train

    usual, pool.timeout = pool.timeout, STUCK_AFTER if hangs else pool.timeout
    try:
        return train.assemble(run, pool.call(train_edited, run, module, edits, world_size=run.world_size))
    finally:
        pool.timeout = usual
