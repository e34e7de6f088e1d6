"""The result of `shardiff check --json`."""

from __future__ import annotations

from benchmarks.documents.fields import Amount, Count, Name, Part, Result


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


class Settings(Part, frozen=True, kw_only=True):
    """device: cpu or cuda, where it is known."""

    device: str | None = None


class Check(Result, frozen=True, kw_only=True):
    """Every run against the reference."""

    rows: list[Row]
    settings: Settings = Settings()

    @property
    def holds(self) -> bool:
        """Whether every run equals the reference."""
        return all(row.passed for row in self.rows)
