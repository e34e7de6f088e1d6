"""Mistakes in collectives, schedules, HLO reader, diff, figures, verifier and ranks, each with the test that must fail.

Mistakes in how a model is trained are in `training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from shared_tests.edited import Edit

ASSERTS = ("AssertionError", "assert ", "Failed: DID NOT RAISE")


@dataclass(frozen=True)
class Planted:
    """name: what is wrong. edit: (old, new) in the source of `module`, old there once. test: file::function.

    words: how the failure's message starts.
    """

    part: str
    name: str
    module: str
    edit: Edit
    test: str
    words: tuple[str, ...] = ASSERTS

    @property
    def file(self) -> PurePath:
        """The module's path in the repository."""
        return PurePath(*self.module.split(".")).with_suffix(".py")


def _plant(part: str, module: str, file: str, *mistakes: tuple[str, ...]) -> tuple[Planted, ...]:
    """Mistakes (name, old, new, test function, words if it is an error) of one module whose tests are in one file."""
    return tuple(
        Planted(part, name, module, (old, new), f"shared_tests/{file}.py::{test}", tuple(words) or ASSERTS)
        for name, old, new, test, *words in mistakes
    )


COLLECTIVES = (
    *_plant(
        "collectives",
        "torch_impl.collectives",
        "proof/test_collectives",
        (
            "broadcast from rank 0 whatever the root",
            "dist.broadcast(x, group_src=root, group=group)",
            "dist.broadcast(x, group_src=0, group=group)",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "scatter in the opposite order of the ranks",
            "[block.contiguous() for block in x.chunk(group.size())]",
            "[block.contiguous() for block in x.chunk(group.size())][::-1]",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "every rank keeps what reduce left in its buffer",
            "return x if group.rank() == root else None",
            "return x",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "all_to_all that keeps its blocks",
            "dist.all_to_all_single(out, x.contiguous(), group=group)",
            "out.copy_(x)",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "backward all_reduce in the caller's gradient",
            "all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None",
            "all_reduce(grads[0], ctx.group), None",
            "test_torch_backward_transposes_forward",
        ),
    ),
    *_plant(
        "collectives",
        "jax_impl.collectives",
        "proof/test_collectives",
        (
            "broadcast from rank 0 whatever the root, in JAX",
            "return lax.psum(jnp.where(lax.axis_index(axis) == root,",
            "return lax.psum(jnp.where(lax.axis_index(axis) == 0,",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "everyone gets the sum that only the root should",
            "return jnp.where(lax.axis_index(axis) == root, total, jnp.zeros_like(total))",
            "return total",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "gather along dim 0 whatever the dim",
            "axis=dim, tiled=True",
            "axis=0, tiled=True",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "permute against the direction of its edges",
            "lax.ppermute(x, axis, edges)",
            "lax.ppermute(x, axis, [(target, source) for source, target in edges])",
            "test_jax_permute_moves_along_the_edges_and_gives_zeros_elsewhere",
        ),
    ),
)

SCHEDULES = (
    *_plant(
        "schedules",
        "contract.schedule",
        "proof/test_schedule",
        (
            "backward passes start at the first stage",
            "down[::-1]",
            "down",
            "test_gpipe_is_complete_and_in_a_possible_order",
            "ValueError: tick",
        ),
        (
            "one tick too many",
            "ticks = range(microbatches + stages - 1)",
            "ticks = range(microbatches + stages)",
            "test_gpipe_is_complete_and_in_a_possible_order",
        ),
        (
            "microbatches in the opposite order",
            "passes = [(stage, tick - start)",
            "passes = [(stage, microbatches - 1 - (tick - start))",
            "test_every_stage_runs_all_forward_passes_and_then_all_backward_passes_in_order",
        ),
        (
            "a pass may run in the tick of what it needs",
            "done.get(need, tick) >= tick",
            "done.get(need, tick + 1) > tick",
            "test_a_wrong_schedule_is_found",
        ),
        (
            "backward without waiting for the stage after",
            'return [action._replace(kind="forward"), *later]',
            'return [action._replace(kind="forward")]',
            "test_a_wrong_schedule_is_found",
        ),
        (
            "bubble theory with m + p ticks",
            "Fraction(stages - 1, microbatches + stages - 1)",
            "Fraction(stages - 1, microbatches + stages)",
            "test_gpipe_is_complete_and_in_a_possible_order",
        ),
    ),
    *_plant(
        "schedules",
        "contract.strategies.pipeline_parallel",
        "proof/test_cost",
        (
            "the smallest microbatch of a tick counts",
            "most = max(rows[tick - s] for s in sending)",
            "most = min(rows[tick - s] for s in sending)",
            "test_an_uneven_microbatch_counts_with_the_largest_of_its_tick",
        ),
        (
            "the scanned pipeline stops before its last tick",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 1",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 2",
            "test_annotated_pipeline_permutes_in_every_tick",
        ),
    ),
    *_plant(
        "schedules",
        "benchmarks.bubbles.timeline",
        "bench/test_bench_bubbles",
        (
            "replay that does not wait for the neighbour",
            "start = max(free[stage], done.get((action.kind, action.microbatch, before), 0))",
            "start = free[stage]",
            "test_stages_that_are_alike_have_the_closed_form_s_bubble_however_long_a_backward_pass_takes",
        ),
    ),
)

READER = (
    *_plant(
        "reader",
        "shardiff.hlo.flow",
        "tool/test_hlo_flow",
        (
            "a loop's condition runs as often as its body",
            'return trips + ONCE if role == "condition" else trips',
            "return trips",
            "test_a_collective_in_a_condition_runs_once_more_than_the_body",
        ),
        (
            "every branch of a conditional runs",
            "return MAYBE",
            "return ONCE",
            "test_nested_loops_multiply_and_a_bound_may_come_from_the_outer_loops_state",
        ),
        (
            "the last caller of a computation counts alone",
            "capped(before + executions[name] * call.times)",
            "capped(executions[name] * call.times)",
            "test_a_computation_called_from_a_loop_and_from_outside_runs_the_sum",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.loops",
        "tool/test_hlo_flow",
        (
            "LE counted as LT",
            'if direction in ("LE", "GE"):',
            'if direction == "GE":',
            "test_trips_are_those_of_running_the_loop",
        ),
        (
            "a bound that the outer loop changes is taken for constant",
            "body not in lookup.program.computations or increment(lookup, body, state) != 0",
            "body not in lookup.program.computations",
            "test_nested_loops_multiply_and_a_bound_may_come_from_the_outer_loops_state",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.groups",
        "tool/test_hlo",
        (
            "the transpose of an iota is forgotten",
            "np.arange(count).reshape(dims).transpose(order)",
            "np.arange(count)",
            "test_every_syntax_of_replica_groups_is_understood",
        ),
        (
            "ids of partitions taken as they stand",
            "return tuple(tuple(r * partitions + p for p in group) for group in groups for r in range(replicas))",
            "return groups",
            "test_channel_and_global_ids_decide_whether_an_id_is_a_replica_a_partition_or_both",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.records",
        "tool/test_hlo",
        (
            "bytes of a started gather are those that go in",
            '(0 if opcode == "reduce-scatter" else 1)',
            "0",
            "test_payload_of_every_form_sync_started_and_combined",
        ),
        (
            "bytes of a reduce_scatter are those that come out",
            "dims=scattered(site, leaf.dims, group_size)",
            "dims=leaf.dims",
            "test_payload_of_every_form_sync_started_and_combined",
        ),
        (
            "a receive counted beside its send",
            'if site.opcode == "recv" and channel(site) in sent:',
            "if False:",
            "test_two_pairs_of_send_and_receive_on_one_channel_are_two_permutes",
        ),
        (
            "copies of one collective counted each",
            "            if key in chains:\n                continue\n",
            "",
            "test_copies_of_one_collective_in_async_collective_fusions_are_one",
        ),
        (
            "the all-reduce of a scatter fusion taken for one",
            '        op = "reduce_scatter"\n',
            "        pass\n",
            "test_only_a_custom_fusion_named_all_reduce_scatter_is_a_reduce_scatter",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.instruction",
        "tool/test_hlo",
        (
            "packed elements rounded down to whole bytes",
            "return -(-size // 8)",
            "return size // 8",
            "test_bytes_are_the_logical_ones_of_every_type_and_layout",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.phases",
        "tool/test_hlo",
        (
            "the transpose of jvp taken for jvp",
            'if "transpose(" in op_name:',
            'if op_name.startswith("transpose("):',
            "test_phase_comes_from_op_name",
        ),
    ),
    *_plant(
        "reader",
        "shardiff.hlo.text",
        "tool/test_hlo_refusals",
        (
            "text that breaks off is read as far as it goes",
            "if current is not None:\n        raise cut_off(",
            "if False:\n        raise cut_off(",
            "test_what_is_wrong_is_said_with_its_line",
        ),
    ),
)

DIFF = (
    *_plant(
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
    *_plant(
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
    *_plant(
        "diff",
        "shardiff.diff.rows",
        "tool/test_diff_rules",
        (
            "combined and split exchanged",
            "if calls[0] > calls[1] and",
            "if calls[0] < calls[1] and",
            "test_a_rewrite_is_found_under_its_rule",
        ),
        (
            "other ranks are an explanation",
            'frozenset(("other_ranks",))',
            "frozenset(())",
            "test_other_ranks_are_no_explanation",
        ),
    ),
    *_plant(
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
    *_plant(
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
        (
            "axes of any sizes multiply",
            "        if len(places) != len(group):\n",
            "        if False:\n",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *_plant(
        "diff",
        "shardiff.diff.rewrites",
        "tool/test_diff_rules",
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
        (
            "a shard of any size",
            "if sense.amount(shard) * size != sense.amount(scatter):",
            "if False:",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *_plant(
        "diff",
        "shardiff.diff.extras",
        "tool/test_diff_rules",
        (
            "a second gather in the forward pass is explained",
            'extra.op == "all_gather" and extra.record.phase == "backward" and',
            'extra.op == "all_gather" and',
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
            'if extra.op not in ("all_reduce", "reduce_scatter") or extra.moves in ("gradient", "parameter"):',
            'if extra.op not in ("all_reduce", "reduce_scatter"):',
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "any loop is a pipeline's",
            "if shape is None:\n        return",
            "shape = shape or (10**6, 1)",
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
        (
            "what the program asks for is resharded",
            'found.open(side, "all_to_all") if by_compiler(a.record)]',
            'found.open(side, "all_to_all")]',
            "test_what_only_looks_like_a_rewrite_is_not_explained",
        ),
    ),
    *_plant(
        "diff",
        "shardiff.diff.alignment",
        "tool/test_comm_diff",
        (
            "a run of neighbours without its first",
            "range(hits[0], at[hits[0]])",
            "range(hits[0] + 1, at[hits[0]])",
            "test_a_subset_has_the_sum_that_it_was_chosen_for",
        ),
        (
            "slices of any shape make up an array",
            "if len(chosen) < 2 or not splits(one, chosen):",
            "if len(chosen) < 2:",
            "test_what_only_looks_alike_is_not_explained",
        ),
    ),
)

FIGURES = (
    *_plant(
        "figures",
        "benchmarks.collectives.numbers",
        "bench/test_collective_figures",
        (
            "mean over ranks where the slowest counts",
            "times.max(axis=0)",
            "times.mean(axis=0)",
            "test_an_iteration_takes_as_long_as_its_slowest_rank",
        ),
        (
            "mean over iterations for the median",
            "float(np.median(slowest))",
            "float(np.mean(slowest))",
            "test_an_iteration_takes_as_long_as_its_slowest_rank",
        ),
        (
            "p99 off by one",
            'method="inverted_cdf"',
            'method="higher"',
            "test_p99_is_by_nearest_rank",
        ),
        (
            "GiB for GB",
            "algbw = payload / seconds / 1e9",
            "algbw = payload / seconds / 2**30",
            "test_bandwidths_follow_nccl_tests",
        ),
        (
            "busbw without its factor",
            '"busbw_GBps": algbw * float(wire_factor(OPS[op], ranks))}',
            '"busbw_GBps": algbw}',
            "test_bandwidths_follow_nccl_tests",
        ),
        (
            "right if one rank is",
            '"correct": all(one["correct"] for one in measured)',
            '"correct": any(one["correct"] for one in measured)',
            "test_rows_are_of_the_slowest_rank_and_wrong_if_one_rank_is",
        ),
        (
            "a fit of absolute errors, which the largest size decides",
            "columns = np.stack([weights / t, weights * s / t], axis=1)\n"
            "        alpha, slope = np.linalg.lstsq(columns, weights, rcond=None)[0]",
            "columns = np.stack([weights, weights * s], axis=1)\n"
            "        alpha, slope = np.linalg.lstsq(columns, weights * t, rcond=None)[0]",
            "test_a_fit_gives_every_size_a_say_whatever_its_time",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.collectives.timing",
        "bench/test_collective_figures",
        (
            "no warm-up",
            "WARM_UP = 3",
            "WARM_UP = 0",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "the clock stops before the device is done",
            "        side.wait(side.call())\n        per_iteration.append(perf_counter() - began)\n",
            "        side.call()\n        per_iteration.append(perf_counter() - began)\n",
            "test_the_clock_runs_from_a_barrier_to_the_end_of_the_call",
        ),
        (
            "no barrier between iterations",
            "        per_iteration.append(perf_counter() - began)\n        side.agree(0)\n",
            "        per_iteration.append(perf_counter() - began)\n",
            "test_the_clock_runs_from_a_barrier_to_the_end_of_the_call",
        ),
        (
            "the barrier is timed too",
            "        per_iteration.append(perf_counter() - began)\n        side.agree(0)\n",
            "        side.agree(0)\n        per_iteration.append(perf_counter() - began)\n",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "no barrier between batches",
            "            seconds_of[mode].append((perf_counter() - began) / calls)\n            side.agree(0)\n",
            "            seconds_of[mode].append((perf_counter() - began) / calls)\n",
            "test_the_clock_runs_from_a_barrier_to_the_end_of_the_call",
        ),
        (
            "a batch's seconds not divided by its calls",
            "(perf_counter() - began) / calls",
            "perf_counter() - began",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "the last calls of a batch are not waited for",
            "    for result in pending:\n        side.wait(result)\n",
            "",
            "test_calls_under_way_are_bounded",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.documents.figures",
        "bench/test_step_figures",
        (
            "the fastest rank of a step for the slowest",
            "return [max(each) for each in zip(*samples, strict=True)]",
            "return [min(each) for each in zip(*samples, strict=True)]",
            "test_spreads_are_medians_and_quartiles",
        ),
        (
            "quartiles by another method",
            'method="inclusive"',
            'method="exclusive"',
            "test_spreads_are_medians_and_quartiles",
        ),
        (
            "a ratio upside down",
            "return [a / b for a, b in zip(ours, theirs, strict=True)]",
            "return [b / a for a, b in zip(ours, theirs, strict=True)]",
            "test_ratios_are_of_adjacent_iterations_within_a_framework_and_of_rounds_across",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.steps.numbers",
        "bench/test_step_figures",
        (
            "a product more than the passes have",
            "product * (3 * problem.layers - 1)",
            "product * 3 * problem.layers",
            "test_rates_count_the_operations_and_bytes_of_the_passes_and_the_update",
        ),
        (
            "a copy counted as read alone",
            '"update_share": spread([moved / b / (2 * parameters / a)',
            '"update_share": spread([moved / b / (parameters / a)',
            "test_rates_count_the_operations_and_bytes_of_the_passes_and_the_update",
        ),
        (
            "exposed share of one rank for the mean over ranks",
            "share = statistics.mean(shares)",
            "share = shares[0]",
            "test_exposed_communication_is_step_less_compute_for_torch_and_the_profile_s_share_for_jax",
        ),
        (
            "agreement of the rank that agrees best",
            'max(rank["difference"] for rank in told)',
            'min(rank["difference"] for rank in told)',
            "test_a_row_is_of_the_rank_that_differs_most_and_holds_most",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.steps.torch",
        "bench/test_step_figures",
        (
            "steps timed without a barrier before",
            "            dist.barrier()\n            start = time.perf_counter()\n",
            "            start = time.perf_counter()\n",
            "test_a_step_is_timed_from_a_barrier_to_the_end_on_the_device",
        ),
        (
            "steps timed without waiting for the device",
            "            loss = contestant.step(state.batch)\n            synchronize(state.device)\n",
            "            loss = contestant.step(state.batch)\n",
            "test_a_step_is_timed_from_a_barrier_to_the_end_on_the_device",
        ),
        (
            "warm-up steps counted",
            "            if iteration >= warmup:\n                taken[name][kind]",
            "            if iteration >= 0:\n                taken[name][kind]",
            "test_a_step_is_timed_from_a_barrier_to_the_end_on_the_device",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.steps.jax",
        "bench/test_step_figures",
        (
            "steps in JAX timed without a barrier before",
            "            state.barrier()\n            start = time.perf_counter()\n",
            "            start = time.perf_counter()\n",
            "test_a_step_in_jax_is_timed_from_a_barrier_to_its_end",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.documents.bubbles",
        "bench/test_bench_bubbles",
        (
            "waiting taken for work",
            'BUSY = ("forward", "backward")',
            'BUSY = ("forward", "backward", "wait")',
            "test_waiting_and_sending_are_idle_and_do_not_lengthen_the_span",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.bubbles.bubbles",
        "bench/test_bench_bubbles",
        (
            "the useful share of a JAX step for what is lost",
            "[1 - ratio for ratio in adjacent_ratios(useful, whole)]",
            "[ratio for ratio in adjacent_ratios(useful, whole)]",
            "test_what_is_lost_in_jax_is_what_the_useful_part_does_not_take",
        ),
        (
            "a fit over m + p ticks",
            "ticks = m + key[1] - 1",
            "ticks = m + key[1]",
            "test_a_fit_finds_the_work_and_what_a_tick_costs",
        ),
    ),
    *_plant(
        "figures",
        "benchmarks.turns",
        "bench/test_bench_steps",
        (
            "results in the order in which ranks answer",
            "return [results[connection] for connection in self.connections]",
            "return list(results.values())",
            "test_results_come_by_rank_whoever_answers_first",
        ),
    ),
    *_plant(
        "figures",
        "shardiff.record",
        "tool/test_communication",
        (
            "an all_reduce counted as half of one",
            "return 2 * share",
            "return share",
            "test_wire_factor",
        ),
        (
            "wire bytes counted twice where records add up",
            '"wire_bytes": [r.wire_bytes for r in records]',
            '"wire_bytes": [2 * r.wire_bytes for r in records]',
            "test_totals_weigh_by_executions",
        ),
        (
            "a broadcast to oneself counted as sent",
            "return Fraction(0 if group_size == 1 else 1)",
            "return Fraction(1)",
            "test_wire_factor",
        ),
    ),
    *_plant(
        "figures",
        "contract.memory",
        "proof/test_memory",
        (
            "AdamW's state counted as one array",
            "slots = len(SLOTS[run.optimizer])",
            "slots = 1",
            "test_sgd_keeps_one_array_and_adamw_two",
        ),
    ),
)

VERIFIER = (
    *_plant(
        "verifier",
        "shardiff.tracing.calls",
        "tool/test_trace_merge",
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
    *_plant(
        "verifier",
        "shardiff.tracing.silent",
        "tool/test_trace_merge",
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
    *_plant(
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
    *_plant(
        "verifier",
        "shardiff.summary",
        "tool/test_trace_formats",
        (
            "a message counted for both its ends",
            "members = [source for source, _ in r.edges]",
            "members = [rank for edge in r.edges for rank in edge]",
            "test_what_the_busiest_rank_sends_is_no_sum_over_ranks_that_do_different_things",
        ),
    ),
    *_plant(
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
    *_plant(
        "verifier",
        "shardiff.tracing.verifier",
        "tool/test_verify",
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
)

API = (
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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
    *_plant(
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

PLANTED = (*COLLECTIVES, *SCHEDULES, *READER, *DIFF, *FIGURES, *VERIFIER, *RANKS, *API)
