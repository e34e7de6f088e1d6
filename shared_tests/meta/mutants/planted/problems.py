"""Mistakes in what a command says of a transformer, and in what it takes for one."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

TEST = "tool/test_transformer_cli"

PROBLEMS = (
    *plant(
        "figures",
        "benchmarks.problem_options",
        TEST,
        (
            "sizes of a transformer are ignored for an MLP",
            "if extra := [name for name in OF_BLOCKS if name in given]:",
            "for extra in [[name] for name in OF_BLOCKS if given.pop(name, None) and False]:",
            "test_what_a_transformer_cannot_be_is_refused_in_one_line",
        ),
    ),
    *plant(
        "figures",
        "benchmarks.problems",
        TEST,
        (
            "experts for every strategy where one needs them",
            'if "expert_parallel" in strategies and isinstance',
            "if strategies and isinstance",
            "test_the_default_plan_has_every_strategy_of_a_transformer_and_experts_where_they_are_split",
            "ValueError: context_parallel cannot split the sequence",
        ),
        (
            "recompute is not written down",
            '({"recompute": run.recompute} if isinstance(run.problem, Transformer) else {})',
            "{}",
            "test_json_of_check_has_the_sizes_that_all_rows_share_and_the_experts_of_each",
        ),
    ),
    *plant(
        "figures",
        "benchmarks.check",
        TEST,
        (
            "experts beside a split sequence are planned, and refuse the whole",
            "if not (whole and ALL_AXES[name] ==",
            "if not (whole and name ==",
            "test_with_experts_everything_has_them_and_nothing_splits_the_sequence_over_cp",
            "ValueError: context_parallel cannot split the sequence",
        ),
    ),
    *plant(
        "figures",
        "benchmarks.documents.diff",
        TEST,
        (
            "every diff has the sizes of the first",
            "own = one.problem or self.settings",
            "own = self.settings",
            "test_a_document_of_diffs_has_each_run_with_its_own_problem",
            "ValueError",
        ),
    ),
)
