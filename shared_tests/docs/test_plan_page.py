"""docs/plan.md: its tables are those of the newest results, and its links lead to files."""

from __future__ import annotations

import re

import pytest

from benchmarks.plan.prove import page


def test_the_tables_are_those_of_the_newest_results():
    text = page.PAGE.read_text()
    assert {"proof", "claims", "rivals"} <= page.blocks().keys()
    assert page.filled(text, page.blocks()) == text, "run python -m benchmarks.plan.prove.page"


def test_a_block_without_a_place_is_refused():
    assert page.filled("<!-- a -->\nold\n<!-- end of a -->", {"a": ["1", "2"]}) == "<!-- a -->\n1\n2\n<!-- end of a -->"
    with pytest.raises(ValueError, match=r"plan.md has no block proof"):
        page.filled("a page", {"proof": []})


def test_links_lead_to_files():
    targets = re.findall(r"\]\(([^)#]+)", page.PAGE.read_text())
    assert targets and [target for target in targets if not (page.PAGE.parent / target).exists()] == []
