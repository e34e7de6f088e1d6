"""The result of `make gpu`; the modules of `benchmarks.gpu` say what the fields are. Seconds, bytes, flops."""

from __future__ import annotations

from typing import Annotated

from benchmarks.documents.check import Row
from benchmarks.documents.fields import (
    Amount,
    Count,
    Dtype,
    Framework,
    Name,
    Part,
    Positive,
    PositiveSpread,
    Result,
    Several,
    Sizes,
    among,
)

STATUSES = ("done", "failed", "out of time", "not reached")


class Proof(Row, frozen=True, kw_only=True):
    """A run against the reference. failures: what does not hold, or the error of a run without a result."""

    model: Name = "MLP"
    failures: list[str]
    seconds: Amount


class Tests(Part, frozen=True, kw_only=True):
    """What pytest said. failures: names of tests."""

    passed: Count
    failed: Count
    skipped: Count
    failures: list[str]


class Rates(Part, frozen=True, kw_only=True):
    """What a device does in a matrix product and in a copy."""

    framework: Framework
    dtype: Dtype
    flops_per_second: Positive
    copy_bytes_per_second: Positive


class Step(Part, frozen=True, kw_only=True):
    """Training steps of one device. share: of the rate of matrix products; update_share: of the rate of a copy.

    model: "MLP" or "transformer"; sequence: tokens of a sample.
    """

    framework: Framework
    implementation: Name
    model: Name = "MLP"
    dtype: Dtype
    batch: Several
    width: Several
    layers: Several
    sequence: Several = 1
    step_seconds: PositiveSpread
    passes_seconds: PositiveSpread | None
    update_seconds: PositiveSpread | None
    flops_per_second: Positive
    share: Positive
    update_share: Positive | None
    peak_bytes: Count | None


class Program(Part, frozen=True, kw_only=True):
    """One step compiled for the device that is here and for a target that is not; pairs are in this order."""

    implementation: Name
    strategy: Name
    mesh: Name
    dtype: Dtype
    device: str
    target: Name
    differences: list[str]
    wire_bytes: list[Count | None]
    memory: dict[str, list[Count | None]]
    seconds: list[Amount]


class Rank(Part, frozen=True, kw_only=True):
    """Steps of one rank of a program of many."""

    implementation: Name
    strategy: Name
    mesh: Name
    dtype: Dtype
    ranks: Several
    step_seconds: PositiveSpread


class Floor(Part, frozen=True, kw_only=True):
    """A copy, or a collective of one rank."""

    framework: Framework
    op: Name
    bytes: Several
    seconds: Positive
    bytes_per_second: Positive


class Reached(Part, frozen=True, kw_only=True):
    """What a part has reached; each part has lists of its own kind."""

    proofs: list[Proof] = []
    tests: Tests | None = None
    rates: list[Rates] = []
    steps: list[Step] = []
    programs: list[Program] = []
    ranks: list[Rank] = []
    floors: list[Floor] = []


class OfPart(Part, frozen=True, kw_only=True):
    """One part. reason: why it is not done."""

    name: Name
    does: str
    status: Annotated[str, among(STATUSES)]
    seconds: Amount
    limit_seconds: Amount
    reason: str | None
    reached: Reached


class Settings(Part, frozen=True, kw_only=True):
    """What ran where; on the CPU it was a rehearsal."""

    device: str
    proof: Sizes
    step: Sizes
    mocked: Several


class Gpu(Result, frozen=True, kw_only=True):
    """Everything that needs a GPU. gpu, packages: facts of the device, and versions."""

    settings: Settings
    gpu: dict[str, str | int]
    packages: dict[str, str | None]
    parts: list[OfPart]

    @property
    def proofs(self) -> list[Proof]:
        """Those of all parts."""
        return [proof for part in self.parts for proof in part.reached.proofs]

    @property
    def holds(self) -> bool:
        """Whether every run that was compared equals the reference, and no test failed."""
        tests = [part.reached.tests for part in self.parts if part.reached.tests]
        return all(proof.passed for proof in self.proofs) and not any(one.failed for one in tests)
