"""Mistakes in what is traced, in its verifier, in what starts ranks, and in the API."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

VERIFIER = (
    *plant(
        "verifier",
        "shardiff.tracing.dispatch",
        "tool/test_trace_calls",
        (
            "what an operator calls itself is noted as well",
            "if thread.inside or not self.open:",
            "if not self.open:",
            "test_every_kind_of_call_is_one_record_with_its_bytes",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.tracer",
        "tool/test_trace_kernels",
        (
            "a method of C++ put back as a function that is bound to nothing",
            "own = vars(owner).get(name)",
            "own = original",
            "test_a_trace_leaves_nothing_behind_and_a_programs_modes_in_their_order",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.libraries",
        "tool/test_trace_kernels",
        (
            "our dispatch mode above the program's",
            "for each in [*[mode] * wanted, *(each for each in stack if each is not mode)]:",
            "for each in [*(each for each in stack if each is not mode), *[mode] * wanted]:",
            "test_a_trace_leaves_nothing_behind_and_a_programs_modes_in_their_order",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.calls",
        "tool/test_trace_disagreements",
        (
            "a sum that fits a maximum",
            "same = call.op, call.dtype, call.reduction, call.peer, call.flags",
            "same = call.op, call.dtype, call.peer, call.flags",
            "test_another_reduction_is_a_disagreement_and_else_another_record",
        ),
        (
            "blocks compared in one direction only",
            "return to_each(a)[j] == from_each(b)[i] and to_each(b)[i] == from_each(a)[j]",
            "return to_each(a)[j] == from_each(b)[i]",
            "test_even_blocks_of_one_rank_fit_uneven_ones_of_another",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.silent",
        "tool/test_trace_disagreements",
        (
            "ranks that move different parameters passed over",
            "if len(details) < 2 and len(lines) < 2:",
            "if len(lines) < 2:",
            "test_ranks_that_meet_with_different_parameters_or_from_different_lines_are_told_once",
        ),
        (
            "replicas compared by name alone",
            "if len(set(texts)) > 1 and members not in lines:",
            "if None in texts and members not in lines:",
            "test_replicas_that_differ_are_told_by_the_first",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.steps",
        "tool/test_trace_merge",
        (
            "the second optimizer's traffic counted to the next step",
            "step = ended if late else ended + 1",
            "step = ended + 1",
            "test_a_run_is_told_by_step",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.program",
        "tool/test_trace_formats",
        (
            "a message counted for both its ends",
            "members = [source for source, _ in r.edges]",
            "members = [rank for edge in r.edges for rank in edge]",
            "test_what_the_busiest_rank_sends_is_no_sum_over_ranks_that_do_different_things",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.budget",
        "tool/test_budget",
        (
            "a budget of each record taken for one of their sum",
            "if r.payload_bytes > budget.limit)",
            "if sum(each.payload_bytes for each in chosen) > budget.limit)",
            "test_without_a_sum_each_record_is_judged_by_itself",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.verifier",
        "tool/test_verifier",
        (
            "a rank let go into a call that does not fit",
            "        if self.verdict:\n            return []\n",
            "",
            "test_messages_of_another_size_or_type_are_a_mismatch",
        ),
        (
            "a rank that has ended expected to come",
            "        if self.is_gone(rank, process):\n            return False\n",
            "",
            "test_a_message_that_nobody_takes_or_sends_is_a_deadlock",
        ),
        (
            "ranks of an earlier group taken for missing",
            "latest.ended is not None and latest.ended > process.began",
            "latest.ended is not None",
            "test_processes_that_come_later_are_waited_for_and_have_no_part_in_what_was_before",
        ),
        (
            "a send that waits for nobody",
            "return self.numbers[place] <= len(box.taken[call.rank]) + box.from_any",
            "return True",
            "test_sends_to_each_other_are_a_deadlock_and_with_receives_posted_are_none",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.merge",
        "tool/test_trace_merge",
        (
            "rings of two stages told apart by when they turn",
            "key: Any = new.phase, new.dtype, ticks[own][1], family",
            "key: Any = new.phase, new.dtype, operation.level, family",
            "test_rings_inside_the_stages_of_a_pipeline_are_siblings_though_one_runs_later",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.names",
        "tool/test_trace_names",
        (
            "a parameter with gaps taken for one without",
            "(not t.is_contiguous() or start + t.nbytes > whole[0])",
            "start + t.nbytes > whole[0]",
            "test_what_is_sent_is_known_by_its_memory",
        ),
    ),
    *plant(
        "verifier",
        "shardiff.tracing.launches",
        "tool/test_trace_started",
        (
            "every Python program of a rank taken for another rank",
            'not in ("", os.environ.get(name))',
            'not in ("",)',
            "test_another_program_is_a_rank_only_if_its_environment_says_so",
        ),
    ),
)

API = (
    *plant(
        "api",
        "shardiff.compiling.meshes",
        "tool/test_api",
        (
            "an axis that takes what is left takes half of it",
            "available // fixed if size == REST",
            "available // fixed // 2 if size == REST",
            "test_the_sizes_of_axes_follow_from_the_target",
        ),
    ),
    *plant(
        "api",
        "shardiff.compiling.abstract",
        "tool/test_abstract",
        (
            "what metadata says of an array is forgotten",
            "specs += [said[0] if said else None for _ in jax.tree.leaves(leaf)]",
            "specs += [None for _ in jax.tree.leaves(leaf)]",
            "test_an_nnx_module_comes_back_as_one_whose_arrays_are_shapes",
        ),
    ),
    *plant(
        "api",
        "shardiff.compiling.reading",
        "tool/test_api",
        (
            "the first of several programs of a dump taken for the one",
            "if len(speaking) > 1:",
            "if len(speaking) > 2:",
            "test_what_cannot_be_read_is_refused_in_one_line",
        ),
    ),
    *plant(
        "api",
        "shardiff.baseline",
        "tool/test_compile",
        (
            "lines of code kept in a baseline",
            'for name in ("source", "name", "computation"):',
            'for name in ("name", "computation"):',
            "test_a_budget_or_a_baseline_that_is_exceeded_makes_the_status_1",
        ),
    ),
    *plant(
        "api",
        "shardiff.cli.sides",
        "tool/test_sides",
        (
            "the first step of a run taken for a steady one",
            "number = step or len(steps)",
            "number = step or 1",
            "test_one_steady_step_of_a_run_is_compared_unless_another_is_asked_for",
        ),
    ),
)

RANKS = (
    *plant(
        "ranks",
        "shardiff.ranks.verdict",
        "tool/test_launch",
        (
            "the last rank to fail blamed",
            "first = min(failed, key=",
            "first = max(failed, key=",
            "test_failed_rank_is_named_first_with_its_phase",
        ),
    ),
    *plant(
        "ranks",
        "shardiff.ranks.silence",
        "tool/test_launch",
        (
            "a process that works taken for an idle one",
            "            self.idle_since = now\n",
            "            pass\n",
            "test_silence_is_over_when_nobody_works",
        ),
    ),
    *plant(
        "ranks",
        "shardiff.ranks.supervisor",
        "tool/test_launch",
        (
            "ranks left to work when the caller has given up",
            "self.processes.settle(ranks, self.timeout, True)",
            "pass",
            "test_error_in_the_callers_callback_ends_the_ranks",
        ),
    ),
    *plant(
        "ranks",
        "shardiff.system.torchrun",
        "tool/test_torchrun",
        (
            "torchrun's variables believed without its store",
            'os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"',
            "True",
            "test_what_torchrun_sets_is_read_in_one_place",
        ),
    ),
)
