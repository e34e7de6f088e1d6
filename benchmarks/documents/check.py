"""The result of `shardiff check --json`."""

from __future__ import annotations

from benchmarks.documents.fields import Amount, Blocks, Count, Name, Part, Result, Several


class Row(Part, frozen=True, kw_only=True):
    """One run and its largest errors; an error is null where it is not finite."""

    implementation: Name
    strategy: Name
    mesh: Name
    dtype: Name
    optimizer: Name
    steps: Count
    loss_error: Amount | None
    grad_error: Amount | None
    param_error: Amount | None
    passed: bool
    experts: Count = 0


class Settings(Blocks, frozen=True, kw_only=True):
    """The sizes that all runs share, and the device, cpu or cuda, where they are known."""

    batch: Several | None = None
    width: Several | None = None
    layers: Several | None = None
    device: str | None = None


class Check(Result, frozen=True, kw_only=True):
    """Every run against the reference."""

    rows: list[Row]
    settings: Settings = Settings()

    @property
    def holds(self) -> bool:
        """Whether every run equals the reference."""
        return all(row.passed for row in self.rows)
