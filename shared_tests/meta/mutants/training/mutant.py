"""A mutant: an edit in the source of one module, the run that it is tried with, and the claims that fail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from contract.axes import one_axis, parse_axes
from contract.problem import Problem
from contract.strategy import Run
from contract.transformer import Transformer
from shared_tests.edited import Edit

# Claims of contract.proof and of the shards, and two ways to end without a result.
LOSS, GRADIENTS, NORM = "loss", "gradients", "gradient norm"
PARAMETERS, STATE = "parameters", "optimizer state"
REPLICAS, SHARDS, DTYPE = "replicas", "shards", "dtype"
RAISES, STUCK = "raises", "stuck"
UPDATE = frozenset({PARAMETERS, STATE})
BACKWARD = UPDATE | {GRADIENTS, NORM}
ALL = BACKWARD | {LOSS}
LOST_SUM = BACKWARD | {REPLICAS}


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong. edits: (old, new) in the source of `module`; each old occurs once. claims: those that fail.

    words: a pattern in the error's text, for a mutant that raises. The rest describes the run: one strategy on `degree`
    ranks, or the strategies of `mesh`. of_both: the implementation, for a module that both JAX implementations share.
    problem: if it is not the MLP of `batch` and `layers`.
    """

    name: str
    module: str
    edits: tuple[Edit, ...]
    claims: frozenset[str]
    strategy: str
    degree: int = 2
    mesh: str = ""
    of_both: str = "shard_map"
    optimizer: str = "adamw"
    steps: int = 1
    batch: int = 8
    layers: int = 4
    microbatches: int = 2
    overlap: bool = True
    words: str = ""
    schedule: str = "gpipe"
    problem: Problem | None = None

    @property
    def run(self) -> Run:
        package, *path = self.module.split(".")
        named = path[0] if path[0] in ("shard_map", "annotated") else self.of_both
        return Run(
            "torch" if package == "torch_impl" else named,
            parse_axes(self.mesh, (self.strategy,)) if self.mesh else one_axis(self.strategy, self.degree),
            self.problem or Problem(self.batch, 8, self.layers, "float64"),
            self.optimizer,
            self.steps,
            self.microbatches,
            overlap=self.overlap,
            device="cpu",
            schedule=self.schedule,
        )


def mutant(name: str, module: str, old: str, new: str, claims: frozenset[str] | set[str], **rest: Any) -> Mutant:
    """A mutant with one edit. Without `strategy`, the strategy is the module's."""
    rest.setdefault("strategy", module.rpartition(".")[2])
    edits = rest.pop("more", ())
    return Mutant(name, module, ((old, new), *edits), frozenset(claims), **rest)


MLP = Transformer(batch=4, width=16, layers=1, dtype="float64", sequence=8, heads=4, ff=24)
MOE = replace(MLP, experts=4)


def of_blocks(module: str, name: str, old: str, new: str, claims: frozenset[str] | set[str], **rest: Any) -> Mutant:
    """A mutant with one edit that is tried with a transformer: with an MLP, if `problem` is not another."""
    return mutant(name, module, old, new, claims, **{"problem": MLP, **rest})


def of_strategy(name: str, *edit: Any, **rest: Any) -> Mutant:
    """A mutant of a strategy of torch, tried with a transformer."""
    return of_blocks(f"torch_impl.explicit.{name}", *edit, **rest)
