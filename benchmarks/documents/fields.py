"""The types of a result's fields: a document that decodes into them can be shown in every table, picture and
comparison. Fields that are not named here may be there and are not looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from benchmarks.problems import words
from contract.problem import DTYPES, Problem
from contract.strategy import IMPLEMENTATIONS, RECOMPUTE
from contract.transformer import Transformer
from shardiff.system import machine

MOST = 10**18  # beyond any figure that is measured here, and within what floats and pictures can hold
NAME = r"^[\w .,:;+=()/%-]{1,200}\Z"


def among(names: Iterable[str]) -> Meta:
    """One of these strings."""
    return Meta(pattern=rf"^(?:{'|'.join(map(re.escape, names))})\Z")


Name = Annotated[str, Meta(pattern=NAME)]  # one word or more, which tables and pictures can show as they are
Count = Annotated[int, Meta(ge=0, le=MOST)]
Several = Annotated[int, Meta(ge=1, le=MOST)]
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=MOST)]
Positive = Annotated[float, Meta(ge=1 / MOST, le=MOST)]
Framework = Annotated[str, among(("torch", "jax"))]
Implementation = Annotated[str, among(IMPLEMENTATIONS)]
Dtype = Annotated[str, among(DTYPES)]


class Part(Struct, frozen=True, kw_only=True):
    """An object in a document."""


class Spread(Part, frozen=True, kw_only=True):
    """A median and its quartiles."""

    median: Number
    q1: Number
    q3: Number


class PositiveSpread(Spread, frozen=True, kw_only=True):
    """The same of what is above 0, such as the time of a step."""

    median: Positive
    q1: Positive
    q3: Positive


class Machine(Part, frozen=True, kw_only=True):
    """What `shardiff.system.machine.facts` says of a machine."""

    os: str
    cpu: str
    cores: Count
    memory_bytes: Count
    gpus: list[str]
    python: str
    versions: dict[str, str | None]
    commit: str | None
    date: str

    def __post_init__(self) -> None:
        for name in ("torch", "jax"):
            if name not in self.versions:
                raise ValueError(f"versions has no {name}")

    def summary(self) -> str:
        """The facts in a line, for a table's foot."""
        return machine.summary(to_builtins(self))


class Block(Part, frozen=True, kw_only=True):
    """One of the runs that a document comes from, and what was measured in it."""

    date: str
    blocks: list[str]


class Result(Part, frozen=True, kw_only=True):
    """What every result has. command: what was typed after `shardiff`, where it is known."""

    machine: Machine
    kind: str = ""
    command: str | None = None
    complete: bool = True
    runs: list[Block] = []

    @property
    def holds(self) -> bool:
        """Whether everything that the result compares is equal; True where it compares nothing."""
        return True


class Blocks(Part, frozen=True, kw_only=True):
    """The sizes that a transformer has besides those of an MLP; null for an MLP."""

    model: Annotated[str, among(("mlp", "transformer"))] = "mlp"
    sequence: Several | None = None
    heads: Several | None = None
    ff: Several | None = None
    experts: Count = 0
    top_k: Several | None = None
    capacity_factor: Positive | None = None
    recompute: Annotated[str, among(RECOMPUTE)] = "none"


class Sizes(Blocks, frozen=True, kw_only=True):
    """The problem, and the device that it ran on where that is known."""

    batch: Several
    width: Several
    layers: Several
    dtype: Dtype
    device: str | None = None

    @property
    def problem(self) -> Problem:
        """What was trained. A size of a transformer that is not there has its default."""
        own = {name: getattr(self, name) for name in ("batch", "width", "layers", "dtype")}
        if self.model == "mlp":
            return Problem(**own)
        blocks = {name: getattr(self, name) for name in Blocks.__struct_fields__ if name not in ("model", "recompute")}
        return Transformer(**own, **{name: size for name, size in blocks.items() if size is not None})

    def __str__(self) -> str:
        return words(self.problem) + ("" if self.recompute == "none" else f", recompute {self.recompute}")
