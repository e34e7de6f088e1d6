"""The results that are kept in benchmarks/results, by the names of their files: DATE_KIND_CORES_cores.json."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from shardiff.system.machine import cores

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def newest(kind: str) -> Path | None:
    """The newest file of a kind, such as plan_paced; None if there is none."""
    return next(iter(sorted(RESULTS.glob(f"????-??-??_{kind}_[0-9]*_cores.json"), reverse=True)), None)


def of_today(kind: str) -> str:
    """The file for a result that is measured on this machine today, from the checkout's root."""
    return f"benchmarks/results/{date.today()}_{kind}_{cores()}_cores.json"
