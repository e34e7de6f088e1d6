"""docs/schedules.md shows the schedules as they are printed, and a line that a deadlock really gives."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from contract.schedule import SCHEDULES, make
from contract.schedule_time import Deadlock, check, table

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n.*?```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_shows_the_schedule_as_it_is_printed(name):
    shown = SECTIONS[name]
    stages = len(shown.splitlines())
    microbatches = 1 + max(int(i) for i in re.findall(r"F(\d+)", shown))
    assert shown == table(make(name, stages, microbatches))


def test_the_page_shows_the_line_that_a_deadlock_gives():
    schedule = make("1f1b", 2, 2)
    f0, b0, *rest = schedule.orders[1]
    with pytest.raises(Deadlock) as raised:
        check(replace(schedule, orders=(schedule.orders[0], (b0, f0, *rest))))
    assert f"\n{raised.value}\n" in PAGE


def test_links_lead_to_files():
    for link in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / link).exists(), link
