"""The result of `shardiff bench steps`; `benchmarks.steps.steps` says what the fields are. Seconds, bytes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

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
    among,
)
from benchmarks.words import counted
from contract.axes import ALL_AXES
from contract.strategy import RECOMPUTE

OFFLOAD = "offload"  # nothing is computed again: what the backward pass needs is moved to the host's memory
Recompute = Annotated[str, among((*RECOMPUTE, OFFLOAD))]
Strategy = Annotated[str, Meta(pattern=rf"^(?:{'|'.join(ALL_AXES)})(?: x (?:{'|'.join(ALL_AXES)}))*\Z")]


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


class OnMesh(Part, frozen=True, kw_only=True):
    """What ran on which ranks: `data_parallel` on `dp=4`. mesh is empty in older results, which have one axis.

    experts: of a transformer's block, where only this strategy has some.
    """

    ranks: Several
    strategy: Strategy
    mesh: Annotated[str, Meta(pattern=r"^[\w=,]{0,200}\Z")] = ""
    experts: Count = 0

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from the others of a document."""
        return self.strategy, self.place

    @property
    def place(self) -> str:
        """The number of ranks, or the mesh where it has several axes."""
        return self.mesh if "," in self.mesh else str(self.ranks)

    @property
    def on(self) -> str:
        """`4 ranks`, or `dp=2,tp=2`."""
        return self.mesh if "," in self.mesh else counted(self.ranks, "rank")

    @property
    def title(self) -> str:
        """The strategy, with the mesh where that has several axes, and the experts where there are some."""
        title = f"{self.strategy}, {self.mesh}" if "," in self.mesh else self.strategy
        return f"{title}, {counted(self.experts, 'expert')}" if self.experts else title


class Row(OnMesh, frozen=True, kw_only=True):
    """One contestant."""

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
    recompute: Recompute = "none"
    product_flops: Count | None = None
    gradient_difference: Amount | None = None

    @property
    def label(self) -> str:
        """The contestant: its implementation, and what it recomputes."""
        return self.implementation if self.recompute == "none" else f"{self.implementation}, {self.recompute}"


class LeftOut(OnMesh, frozen=True, kw_only=True):
    """A library equivalent that could not take part."""

    implementation: Name
    reason: str


class Ratio(OnMesh, frozen=True, kw_only=True):
    """The step time of one contestant over another's."""

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
    """iterations of each contestant are split into so many rounds. reshard: null if each run has its default."""

    optimizer: Name
    microbatches: Several
    iterations: Several
    rounds: Several
    schedule: Name = "gpipe"
    reshard: bool | None = None


class Steps(Result, frozen=True, kw_only=True):
    """Training steps of every contestant, timed."""

    method: dict[str, str]
    settings: Settings
    rows: list[Row]
    ratios: list[Ratio]
    single_device: list[Rates]
    failures: list[str]
    left_out: list[LeftOut] = []

    @property
    def holds(self) -> bool:
        """Whether all contestants train the same."""
        return not self.failures
