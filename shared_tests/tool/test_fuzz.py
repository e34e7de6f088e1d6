"""A slice of `make fuzz`; and the campaign survives what an input does to its process."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared_tests.tool import fuzz
from shared_tests.tool.answers import say


@pytest.fixture(scope="module", autouse=True)
def garbage_of_others():
    """What other tests have left in this process is not searched for garbage on an input's time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_a_slice_of_the_campaign(tmp_path):
    failed = [
        f"{kind}:{number} {why}"
        for kind, count in (("hlo", 200), ("json", 60))
        for number in range(count)
        if (why := fuzz.one(kind, 1, number, tmp_path)[2])
    ]
    assert failed == []


def test_an_input_of_the_campaign_can_be_made_again():
    assert [fuzz.make(kind, 3, 7) for kind in fuzz.KINDS] == [fuzz.make(kind, 3, 7) for kind in fuzz.KINDS]
    assert len({fuzz.make("hlo", 3, number)[1] for number in range(50)}) > 45


@pytest.mark.parametrize(
    "text", ["mesh['x'=" + "1" * 5000 + "]{'x'}", "[" + "1" * 5000 + ",1]<=[2]", "{{" + "1" * 5000 + "}}"]
)
def test_an_error_quotes_no_more_than_a_line_s_worth_of_the_program(text, places, capsys):
    body = f"ROOT %r = f32[8] all-reduce(%p), replica_groups={text}, to_apply=%add"
    from shared_tests.tool.hlo_modules import module

    Path("a.hlo").write_text(module(body))
    status, said = say(["hlo", "a.hlo"], capsys)
    assert status == 2 and len(said) < 400


def test_a_campaign_survives_inputs_that_crash_hang_or_take_all_memory(monkeypatch):
    share = fuzz.Share([("hlo", 0), ("hlo", 1)], 0)
    ended: Any = SimpleNamespace(kill=lambda: None, join=lambda: None)
    share.process = ended
    started = []
    monkeypatch.setattr(fuzz.Share, "start", lambda self: started.append(self.jobs))
    tally = fuzz.Tally()
    share.lost(tally, "the process ended with -11")
    assert tally.failures == [("hlo", 0, "the process ended with -11")] and started == [[("hlo", 1)]]
    with pytest.raises(fuzz.Flaw, match="not done after 0.05 s"), fuzz.time_limit(0.05):
        while True:
            pass
