"""Every planted mistake fails just the claims that it names, and without it nothing fails."""

from __future__ import annotations

import importlib
import sys
from collections import Counter

import pytest

from contract.proof import CLAIMS
from shared_tests import evidence
from shared_tests.edited import edited, edited_source
from shared_tests.mutants import ALL, HARMLESS, MUTANTS, STUCK, UPDATE, judge

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_a_mistake_fails_just_the_claims_that_it_names(mutant, pool, reference_of):
    verdict = judge(mutant, pool, reference_of(mutant.run))
    assert verdict.claims == mutant.claims, "\n".join(verdict.lines)
    assert mutant.words in "\n".join(verdict.lines)


@pytest.mark.parametrize("run", dict.fromkeys(mutant.run for mutant in MUTANTS), ids=evidence.label)
def test_without_the_mistake_nothing_fails(run, execute, reference_of):
    assert evidence.failures(run, execute(run), reference_of(run)) == []


@pytest.mark.parametrize("mutant", HARMLESS, ids=lambda mutant: mutant.name)
def test_an_edit_that_is_no_mistake_fails_nothing(mutant, pool, reference_of):
    assert judge(mutant, pool, reference_of(mutant.run)).lines == ()


def test_every_claim_is_failed_by_a_mutant_and_names_are_unique():
    failed = Counter(claim for mutant in MUTANTS for claim in mutant.claims)
    assert {*CLAIMS, "replicas", "shards", "raises", STUCK} <= set(failed)
    assert len(set(NAMES)) == len(NAMES) and all(mutant.claims for mutant in MUTANTS)
    assert ALL == set(CLAIMS) and UPDATE < ALL
    for claim in CLAIMS:  # each is needed: a mutant fails it alone
        assert any(mutant.claims == {claim} for mutant in MUTANTS), claim


@pytest.mark.parametrize("package", ["torch_impl", "jax_impl"])
def test_mutants_are_planted_in_every_strategy_and_in_what_strategies_share(package):
    modules = {mutant.module for mutant in MUTANTS if mutant.module.startswith(package)}
    assert {f"{package}.train", f"{package}.model"} <= modules
    for strategy in ("data", "tensor", "megatron_tensor", "pipeline"):
        assert any(module.endswith(f".{strategy}_parallel") for module in modules), strategy


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
        strategy = importlib.import_module("jax_impl.shard_map.single_device")
        assert inside is not before and strategy.gelu is sys.modules["jax_impl.model"].gelu
        raise RuntimeError("inside")
    assert importlib.import_module("jax_impl.train") is before is sys.modules["jax_impl"].train
    assert importlib.import_module("jax_impl.shard_map.single_device").gelu is not strategy.gelu
