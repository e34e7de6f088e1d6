"""`make traces` looks for what it says: every kind of script in every way, and whatever a trace changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shared_tests.tool import traced_often
from shared_tests.tool.traced_often import MODELS, Trial, flaw, report, script, trials

EXPECTED = Counter({"result 0 0x1p-1": 1, "result 1 0x1p-1": 1})
TRIAL = Trial("ddp", True, 5, True, "error")


def test_every_script_is_traced_in_every_way() -> None:
    ways = Counter((t.name, t.in_main, t.verify) for t in trials(50))
    assert len(ways) == len(MODELS) * 2 * 2 and min(ways.values()) >= 4
    assert {t.status for t in trials(50)} == {0, 5} and {t.warnings for t in trials(50)} == {"", "error"}
    for name in MODELS:
        for in_main in (False, True):
            compile(script(name, in_main), name, "exec")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((5, EXPECTED, ""), None),
        ((None, Counter(), ""), "has not ended within 120 s"),
        ((1, EXPECTED, "a\nb\nc\nd"), "ended with status 1: b | c | d"),
        ((5, Counter({"result 0 0x1p-1": 1}), ""), "printed {'result 0 0x1p-1': 1} where it prints "),
    ],
)
def test_what_a_trace_changes_is_told(ended: Any, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(traced_often, "ended", lambda *given: commands.append(given) or ended)
    found = flaw(TRIAL, Path("/tmp"), EXPECTED)
    assert found is None if said is None else found is not None and found.startswith(said)
    [(command, _, warnings)] = commands
    assert command[-3:] == ["--verify", "ddp_main.py", "5"] and warnings == "error"
    text = report([(TRIAL, found)], 60.0)
    assert f"{int(said is not None)} of 1 traces hang or change" in text
    assert "| ddp, in a function | 1 | 1 | 1 | 1 | " in text
    assert (f"- {TRIAL}: {found}" in text) == (said is not None)
