"""The result of `shardiff bench steps`; `benchmarks.steps.steps` says what the fields are. Seconds, bytes."""

from __future__ import annotations

from benchmarks.documents.fields import (
    Amount,
    Count,
    Name,
    Number,
    Part,
    Positive,
    PositiveSpread,
    Result,
    Several,
    Sizes,
    Spread,
)


class Held(Part, frozen=True, kw_only=True):
    """Bytes of each kind; null where they were not measured."""

    parameters: Count | None
    gradients: Count | None
    optimizer_state: Count | None
    activations: Count | None
    temporaries: Count | None

    @property
    def state(self) -> int | None:
        """Parameters, gradients and optimizer state together."""
        parts = [self.parameters, self.gradients, self.optimizer_state]
        return None if None in parts else sum(part for part in parts if part is not None)

    def by_kind(self) -> dict[str, int | None]:
        """Kind -> bytes."""
        return {name: getattr(self, name) for name in KINDS}


KINDS = Held.__struct_fields__


class Memory(Part, frozen=True, kw_only=True):
    """Of the rank that holds most."""

    measured: Held
    closed_form: Held | None


class Work(Part, frozen=True, kw_only=True):
    """What a device does beside communicating; see `shardiff.hlo.work.Work`."""

    products: Count
    flops: Count
    transposes: Count
    transposed_bytes: Count
    copies: Count
    copied_bytes: Count


class Row(Part, frozen=True, kw_only=True):
    """One contestant."""

    ranks: Several
    strategy: Name
    implementation: Name
    framework: Name
    peer: bool
    step_seconds: PositiveSpread
    compute_seconds: Spread | None
    exposed_seconds: Spread | None
    exposed_share: Number | None
    samples_seconds: list[list[Positive]]
    memory: Memory
    wire_bytes: Count | None
    loss: Number | None
    difference: Amount | None
    wire_bytes_compiled: Count | None = None
    work: Work | None = None


class Ratio(Part, frozen=True, kw_only=True):
    """The step time of one contestant over another's."""

    ranks: Several
    strategy: Name
    of: Name
    to: Name
    by: Name
    ratio: Spread


class Rates(Part, frozen=True, kw_only=True):
    """What a single device reaches of its own rates."""

    framework: Name
    batch: Several
    matmul_flops_per_second: PositiveSpread
    forward_backward_flops_per_second: PositiveSpread
    share: PositiveSpread
    update_share: PositiveSpread
    update_bytes_per_second: PositiveSpread
    copy_bytes_per_second: PositiveSpread


class Settings(Sizes, frozen=True, kw_only=True):
    """iterations of each contestant are split into so many rounds."""

    optimizer: Name
    microbatches: Several
    iterations: Several
    rounds: Several


class Steps(Result, frozen=True, kw_only=True):
    """Training steps of every contestant, timed."""

    method: dict[str, str]
    settings: Settings
    rows: list[Row]
    ratios: list[Ratio]
    single_device: list[Rates]
    failures: list[str]

    @property
    def holds(self) -> bool:
        """Whether all contestants train the same."""
        return not self.failures
