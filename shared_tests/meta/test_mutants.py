"""A sample of the mistakes in training: each fails exactly the claims that it names, and without it nothing fails.

The others, and all mistakes elsewhere, each of which starts a pytest of its own, are only checked for form here:
`make mutants` runs them.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter

import pytest

from contract.axes import AXES_OF_BLOCKS
from contract.proof import CLAIMS
from shared_tests import evidence
from shared_tests.edited import edited, edited_source
from shared_tests.meta.mutants.__main__ import PARTS, Line, table
from shared_tests.meta.mutants.in_copy import ROOT, first_failure
from shared_tests.meta.mutants.judge import judge
from shared_tests.meta.mutants.planted import ASSERTS, PLANTED
from shared_tests.meta.mutants.training import ALL, HARMLESS, MUTANTS, STUCK, UPDATE

NAMES = [mutant.name for mutant in MUTANTS]
# `make mutants` runs all of them. Here run the last of each module and every other one in which strategies compose; of
# JAX, for which a program is compiled, every sixth of these, and of transformers there the ring.
OF_MLP = [mutant for mutant in MUTANTS if mutant.problem is None]
CHOSEN = [*{mutant.module: mutant for mutant in OF_MLP if not mutant.mesh}.values()]
CHOSEN += [mutant for mutant in OF_MLP if mutant.mesh][::2]
SAMPLE = [mutant for i, mutant in enumerate(CHOSEN) if mutant.module.startswith("torch_impl") or i % 6 == 0]
BLOCKS = {mutant.module: mutant for mutant in MUTANTS if mutant.problem is not None}
SAMPLE += [m for m in BLOCKS.values() if m.module.startswith("torch_impl") or m.module.endswith("ring_attention")]


@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda mutant: mutant.name)
def test_a_mistake_fails_just_the_claims_that_it_names(mutant, pool, reference_of):
    verdict = judge(mutant, pool, reference_of(mutant.run))
    assert verdict.claims == mutant.claims, "\n".join(verdict.lines)
    assert verdict.caught(mutant), "\n".join(verdict.lines)


@pytest.mark.parametrize("run", dict.fromkeys(mutant.run for mutant in SAMPLE), ids=evidence.label)
def test_without_the_mistake_nothing_fails(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []


@pytest.mark.parametrize("mutant", HARMLESS, ids=lambda mutant: mutant.name)
def test_an_edit_that_is_no_mistake_fails_nothing(mutant, pool, reference_of):
    assert judge(mutant, pool, reference_of(mutant.run)).lines == ()


def test_every_claim_is_failed_by_a_mutant_and_names_are_unique():
    failed = Counter(claim for mutant in MUTANTS for claim in mutant.claims)
    assert {*CLAIMS, "replicas", "shards", "raises", STUCK} <= set(failed)
    assert sum(mutant.problem is not None for mutant in MUTANTS) >= 50  # in transformers
    assert len(set(NAMES)) == len(NAMES) and all(mutant.claims for mutant in MUTANTS)
    assert ALL == set(CLAIMS) and UPDATE < ALL
    for claim in CLAIMS:  # each is needed: a mutant fails it alone
        assert any(mutant.claims == {claim} for mutant in MUTANTS), claim


@pytest.mark.parametrize("package", ["torch_impl", "jax_impl"])
def test_mutants_are_planted_in_every_strategy_and_in_what_strategies_share(package):
    modules = {mutant.module for mutant in MUTANTS if mutant.module.startswith(package)}
    assert {f"{package}.train", f"{package}.model"} <= modules
    assert f"{package}.blocks" in modules and f"{package}.online_softmax" in modules
    for strategy in ("data_parallel", "tensor_parallel", "megatron_tensor_parallel", "pipeline_parallel"):
        assert any(module.endswith(f".{strategy}") for module in modules), strategy
    for strategy in AXES_OF_BLOCKS:
        written = "explicit" if package == "torch_impl" else "shard_map"
        assert f"{package}.{written}.{strategy}" in modules, strategy


def test_every_edit_fits_the_source_and_gives_a_module_of_python():
    for one in (*MUTANTS, *HARMLESS):
        ast.parse(edited_source(one.module, one.edits))
    for one in PLANTED:
        assert (ROOT / one.file).is_file()
        ast.parse(edited_source(one.module, [one.edit]))


def test_every_mistake_elsewhere_names_a_test_that_there_is():
    tests: dict[str, set[str]] = {}
    for one in PLANTED:
        file, _, name = one.test.partition("::")
        if file not in tests:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            tests[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in tests[file], one.test


def test_mistakes_are_planted_in_every_part():
    parts = Counter(one.part for one in PLANTED)
    assert set(parts) | {"strategies", "training"} == set(PARTS)
    assert min(parts[part] for part in ("reader", "diff", "figures")) >= 8
    assert min(parts[part] for part in ("collectives", "schedules")) >= 4
    names = [one.name for one in PLANTED]
    assert len({*names, *NAMES}) == len(names) + len(NAMES)


JUNIT = '<testsuites><testsuite><testcase name="a" /><testcase name="b">%s</testcase></testsuite></testsuites>'


def test_a_failure_of_the_test_is_told_from_an_error_around_it():
    failed = JUNIT % '<failure message="assert 1 == 2&#10; +  where">def test_b()...</failure>'
    assert first_failure(failed) == "assert 1 == 2" and "assert 1 == 2".startswith(ASSERTS)
    error = JUNIT % '<error message="collection failure">file.py:1: in x&#10;E   SyntaxError: invalid syntax</error>'
    assert first_failure(error) == "error outside of the test: E   SyntaxError: invalid syntax"
    assert not first_failure(error).startswith(ASSERTS)
    assert first_failure(JUNIT % "") == ""


def test_the_table_tells_what_was_caught_by_what_and_what_was_not():
    lines = [
        Line("reader", "wrong", "a.py", "shared_tests/test_a.py::test_it", 1.25, True, "assert 1 == 2"),
        Line("reader", "worse", "a.py", "shared_tests/test_a.py::test_it", 0.5, False, "the test passes"),
    ]
    shown = table(lines).splitlines()
    assert shown[1] == "reader: 1 of 2 caught" and shown[-1] == "1 of 2 planted mistakes are caught"
    assert shown[2].split() == ["wrong", "a.py", "1.2", "s", "test_a.py::test_it"]
    assert shown[3].endswith("NOT CAUGHT by test_a.py::test_it: the test passes")


def test_an_edit_that_matches_not_once_is_refused():
    with pytest.raises(ValueError, match="torch_impl.model has 0 times, not once: 'no such text'"):
        edited_source("torch_impl.model", [("no such text", "")])
    with pytest.raises(ValueError, match="not once: 'def '"):
        edited_source("torch_impl.model", [("def ", "")])


def test_an_edit_ends_with_its_block():
    before = importlib.import_module("jax_impl.train")
    with (
        pytest.raises(RuntimeError, match="inside"),
        edited("jax_impl.model", [("approximate=False", "approximate=True")]),
    ):
        inside = importlib.import_module("jax_impl.train")
        strategy = importlib.import_module("jax_impl.shard_map.tensor_parallel")
        assert inside is not before and strategy.gelu is sys.modules["jax_impl.model"].gelu
        raise RuntimeError("inside")
    assert importlib.import_module("jax_impl.train") is before is sys.modules["jax_impl"].train
    assert importlib.import_module("jax_impl.shard_map.tensor_parallel").gelu is not strategy.gelu
