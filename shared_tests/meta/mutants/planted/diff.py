"""Mistakes in the diff."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

DIFF = (
    *plant(
        "diff",
        "shardiff.record",
        "tool/test_comm_diff",
        (
            "wire bytes of a loop counted once",
            "record.wire_bytes * record.times for",
            "record.wire_bytes for",
            "test_bytes_of_a_step_are_wire_bytes_as_often_as_they_are_sent",
        ),
        (
            "payload for wire bytes",
            "record.wire_bytes * record.times for",
            "record.payload_bytes * record.times for",
            "test_bytes_of_a_step_are_wire_bytes_as_often_as_they_are_sent",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.rows",
        "tool/test_comm_diff",
        (
            "what only the right has is not shown",
            "    for side in (0, 1):\n        by_record:",
            "    for side in (0,):\n        by_record:",
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "leftover executions counted with the record's own",
            "else replace(record, executions=Executions(count, count))",
            "else record",
            "test_all_parts_and_executions_that_are_left_over_count_once",
        ),
        (
            "a part for the whole record",
            "if len(some) < max(len(record.parts), 1):",
            "if False:",
            "test_all_parts_and_executions_that_are_left_over_count_once",
        ),
        (
            "across phases first, within them afterwards",
            "    for same_phase in (True, False):\n        senses",
            "    for same_phase in (False, True):\n        senses",
            "test_what_is_more_alike_is_matched_first",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.rows",
        "tool/test_diff_rules",
        (
            "combined and split exchanged",
            "if calls[0] > calls[1] and",
            "if calls[0] < calls[1] and",
            "test_a_rewrite_is_found_under_its_rule",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.rows",
        "tool/test_diff_lookalikes",
        (
            "other ranks are an explanation",
            'frozenset(("other_ranks",))',
            "frozenset(())",
            "test_other_ranks_are_no_explanation",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.atoms",
        "tool/test_comm_diff",
        (
            "groups of any two sizes are alike",
            "    if not agree(a.record.group_size, b.record.group_size):\n        return False\n",
            "",
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "parameters are activations",
            "if not agree(a.moves, b.moves):",
            "if False:",
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "any reduction is a sum",
            "return agree(a.reduction, b.reduction) and agree(a.record.root, b.record.root)",
            "return agree(a.record.root, b.record.root)",
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "any root is the same",
            "return agree(a.reduction, b.reduction) and agree(a.record.root, b.record.root)",
            "return agree(a.reduction, b.reduction)",
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "integers are floats",
            '        return "float"\n',
            '        return "integer"\n',
            "test_what_no_rule_explains_is_listed_on_both_sides_with_its_bytes",
        ),
        (
            "wire bytes of parts rounded down each",
            "return end - start",
            "return (end - start) // 2 * 2",
            "test_wire_bytes_of_parts_add_up_to_the_record_s",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.atoms",
        "tool/test_diff_rules",
        (
            "another type overlooked without a word",
            '"dtype": a.dtype != b.dtype,',
            '"dtype": False,',
            "test_a_rewrite_is_found_under_its_rule",
        ),
        (
            "another phase overlooked without a word",
            '"moved": mine.phase != theirs.phase,',
            '"moved": False,',
            "test_a_rewrite_is_found_under_its_rule",
        ),
        (
            "calls of one line are a loop",
            "record.computation is not None and record.times > 1",
            "record.times > 1",
            "test_a_rewrite_is_found_under_its_rule",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.atoms",
        "tool/test_diff_lookalikes",
        (
            "axes of any sizes multiply",
            "        if len(places) != len(group):\n",
            "        if False:\n",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.rewrites",
        "tool/test_diff_lookalikes",
        (
            "a gather before the scattered sum is its half",
            "return atom.index > last and ",
            "return ",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "halves may lie in two phases",
            "atom.record.phase == phase and known",
            "known",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a shard of any size",
            "if sense.amount(shard) * size != sense.amount(scatter):",
            "if False:",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.extras",
        "tool/test_diff_lookalikes",
        (
            "a second gather in the forward pass is explained",
            'twin.gathers and phases == ("backward", "forward")',
            "twin.gathers",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "any backward collective is recomputed",
            "    return same_line and",
            "    return same_line or",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a gradient reduced twice is added first",
            'if extra.moves in ("gradient", "parameter"):',
            "if False:",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a sum too many in the forward pass is an addend",
            'extra.op not in ("all_reduce", "reduce_scatter") or extra.record.phase != "backward"',
            'extra.op not in ("all_reduce", "reduce_scatter")',
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a loss that is summed once more is that of the whole batch",
            "and not any(same_ranks(atom, other) for other in theirs)",
            "",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a count is a loss",
            'atom.elements == UNIT and kind_of(atom.dtype) == "float" and',
            "atom.elements == UNIT and",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.ticks",
        "tool/test_diff_lookalikes",
        (
            "any loop is a pipeline's",
            "    if shape is None:\n        return\n    count, microbatches = shape\n    groups",
            "    count, microbatches = shape or (10**6, 1)\n    groups",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.alignment",
        "tool/test_diff_properties",
        (
            "a run of neighbours without its first",
            "range(hits[0], at[hits[0]])",
            "range(hits[0] + 1, at[hits[0]])",
            "test_a_subset_has_the_sum_that_it_was_chosen_for",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.alignment",
        "tool/test_comm_diff",
        (
            "slices of any shape make up an array",
            "if len(chosen) < 2 or not splits(one, chosen):",
            "if len(chosen) < 2:",
            "test_what_only_looks_alike_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.rings",
        "tool/test_diff_lookalikes",
        (
            "a ring with a step too few",
            "missing = size - 1",
            "missing = size - 2",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "a permute anywhere is part of a ring",
            "any(source in group and target in group for group in groups)",
            "True",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "any number of peers is one",
            "if one.record.group_size != 2:",
            "if False:",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.layouts",
        "tool/test_diff_lookalikes",
        (
            "a gather of a mask is an exchange of tokens",
            "if a.elements >= theirs.elements and kind_of(a.dtype) == kind_of(theirs.dtype)",
            "if a.elements >= theirs.elements",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "weights that both sides gather are gathered by one instead",
            "if (theirs and derived) if not vectors else stays(mine, vectors, theirs):",
            "if theirs and derived:",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "what the program asks for is resharded",
            'found.open(side, "all_to_all") if by_compiler(a)]',
            'found.open(side, "all_to_all")]',
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
)
