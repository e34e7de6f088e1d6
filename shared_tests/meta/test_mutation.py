"""How `make mutation` interprets mutmut's output. The run itself takes a quarter of an hour."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared_tests.meta.mutation import __main__ as tool
from shared_tests.meta.mutation.__main__ import Mutant, by_module, changed_lines, judged, parse, table
from shared_tests.meta.mutation.equivalent import EQUIVALENT, why_equivalent

RESULTS = """
    contract.cost.x__loss__mutmut_1: killed
    contract.cost.x__loss__mutmut_2: survived
    shardiff.hlo.x_count__mutmut_1: timeout
    shardiff.hlo.loops.x\u01c1Lookup\u01c1step__mutmut_10: survived
    shardiff.hlo.loops.x\u01c1Lookup\u01c1step__mutmut_11: no tests
"""

DIFF = """# contract.cost.x__loss__mutmut_2: survived
--- contract/cost.py
+++ contract/cost.py
@@ -1,3 +1,3 @@
 def f(a, b):
-    return zip(a, b, strict=True)
+    return zip(a, b, strict=False)
"""


def test_mutants_are_counted_by_module_and_named_by_function():
    mutants = parse(RESULTS)
    assert [mutant.function for mutant in mutants] == [
        *["contract.cost._loss"] * 2,
        "shardiff.hlo.count",
        *["shardiff.hlo.loops.Lookup.step"] * 2,
    ]
    modules = by_module(mutants)
    assert {name: (found["mutants"], found["survived"]) for name, found in modules.items()} == {
        "contract.cost": (2, 1),
        "shardiff.hlo": (1, 0),
        "shardiff.hlo.loops": (2, 1),
    }
    shown = table(modules).splitlines()
    assert shown[0].split() == ["mutants", "killed", "timeout", "no", "tests", "equivalent", "survived"]
    assert shown[-1].split() == ["all", "5", "1", "1", "1", "0", "2"]


def test_what_is_known_to_be_equivalent_is_set_apart_and_the_rest_is_shown():
    assert changed_lines(DIFF) == ("    return zip(a, b, strict=True)", "    return zip(a, b, strict=False)")
    other = DIFF.replace("strict=False", "strict=True, c")
    mutants, survivors = judged(parse(RESULTS)[:3], lambda name: DIFF)
    assert [mutant.status for mutant in mutants] == ["killed", "equivalent", "timeout"]
    assert [bool(one["equivalent"]) for one in survivors] == [True]
    mutants, survivors = judged([Mutant("contract.cost.x__loss__mutmut_2", "survived")], lambda name: other)
    assert mutants[0].status == "survived" and survivors[0]["new"] == "return zip(a, b, strict=True, c)"


def test_another_name_of_an_encoding_is_the_same_encoding():
    for old, new, same in (
        ('x.encode("utf-8")', 'x.encode("UTF-8")', True),
        ('x.encode("utf-8", "replace")', 'x.encode("UTF-8", "REPLACE")', False),
        ('x.encode("utf-8")', 'x.encode("XXutf-8XX")', False),
        ('x.encode("utf-8")', 'x.encode("utf-8")', False),
    ):
        assert (why_equivalent("a.f", old, new) is not None) == same


def test_survivors_without_a_reason_are_tried_again_and_what_takes_too_long_is_tried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    meta = tmp_path / "contract" / "cost.py.meta"
    meta.parent.mkdir()
    names = [f"contract.cost.x__loss__mutmut_{n}" for n in range(4)]
    meta.write_text(json.dumps({"exit_code_by_key": dict(zip(names, (0, 0, 1, 36), strict=True)), "durations": {}}))
    (tmp_path / "mutmut-stats.json").touch()
    found = dict(zip(names, ("survived", "survived", "killed", "timeout"), strict=True))
    tried = []

    def mutmut(command: str, *rest: str) -> str:
        if command == "show":
            return DIFF if rest == (names[0],) else DIFF.replace("=False", "=True, c")
        return "\n".join(f"    {name}: {status}" for name, status in found.items())

    def run(command: list, **options: object) -> None:
        tried.append(command[command.index("--max-children") + 2 :])
        found[names[1]] = ("timeout", "killed")[len(tried) - 1]

    monkeypatch.setattr(tool, "mutmut", mutmut)
    monkeypatch.setattr(tool, "MUTANTS", tmp_path)
    monkeypatch.setattr(tool.subprocess, "run", run)
    tool.run([])
    assert tried == [[], [names[1]]] and not (tmp_path / "mutmut-stats.json").exists()
    again = json.loads(meta.read_text())
    assert again == {"exit_code_by_key": dict(zip(names, (0, None, 1, 36), strict=True)), "durations": {}}


def test_every_reason_is_for_a_function_that_there_is():
    root = Path(__file__).parents[2]
    for one in EQUIVALENT:
        module, _, name = one.where.rpartition(".")
        file = root / (module.replace(".", "/") + ".py")
        if not file.exists():  # a package, or a method of a class
            file = root / module.replace(".", "/") / "__init__.py"
        if not file.exists():
            file = root / (module.rpartition(".")[0].replace(".", "/") + ".py")
        assert f"def {name}(" in file.read_text(encoding="utf-8"), one.where
        assert one.why and why_equivalent("another.function", "x", "y") is None
