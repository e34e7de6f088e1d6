"""Mistakes in what is measured, and in closed forms."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

FIGURES = (
    *plant(
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
            '"correct": all(one["correct"] and one["right"][mode] for one in measured)',
            '"correct": any(one["correct"] and one["right"][mode] for one in measured)',
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
    *plant(
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
            "    last = side.call()\n    side.wait(last)\n",
            "    last = side.call()\n",
            "test_the_clock_runs_from_a_barrier_to_the_end_of_the_call",
        ),
        (
            "no barrier between timings",
            "        side.renew(after)\n        side.agree(0)\n",
            "        side.renew(after)\n",
            "test_the_clock_runs_from_a_barrier_to_the_end_of_the_call",
        ),
        (
            "the check of the values is timed too",
            "        seconds_of[mode].append((perf_counter() - began) / times)\n"
            "        right[mode] = side.right(result, times) and right[mode]\n",
            "        right[mode] = side.right(result, times) and right[mode]\n"
            "        seconds_of[mode].append((perf_counter() - began) / times)\n",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "of the timed calls the last one's values alone count",
            "right[mode] = side.right(result, times) and right[mode]",
            "right[mode] = side.right(result, times)",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "a batch's seconds not divided by its calls",
            "(perf_counter() - began) / times",
            "perf_counter() - began",
            "test_a_call_is_timed_alone_and_as_often_as_the_budget_allows",
        ),
        (
            "the last calls of a batch are not waited for",
            "    for result in (*pending, last):\n        side.wait(result)\n",
            "",
            "test_calls_under_way_are_bounded",
        ),
    ),
    *plant(
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
    *plant(
        "figures",
        "benchmarks.steps.numbers",
        "bench/test_step_figures",
        (
            "a product more than the passes have",
            "(forward // problem.layers if problem.unit == 1 else 0)",
            "0",
            "test_rates_count_the_operations_and_bytes_of_the_passes_and_the_update",
        ),
        (
            "a copy counted as read alone",
            '"update_share": spread([moved / b / (2 * parameters / a)',
            '"update_share": spread([moved / b / (parameters / a)',
            "test_rates_count_the_operations_and_bytes_of_the_passes_and_the_update",
        ),
        (
            "a negative exposed share told as zero",
            'return {"compute_seconds": None, "exposed_seconds": None, "exposed_share": None}\n        return',
            "share = 0.0\n        return",
            "test_a_step_that_takes_longer_without_communication_has_no_exposed_share",
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
    *plant(
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
    *plant(
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
    *plant(
        "figures",
        "benchmarks.documents.bubbles",
        "bench/test_bench_bubbles",
        (
            "waiting taken for work",
            'BUSY = ("forward", "backward", "backward_input", "backward_weight")',
            'BUSY = ("forward", "backward", "backward_input", "backward_weight", "wait")',
            "test_waiting_and_sending_are_idle_and_do_not_lengthen_the_span",
        ),
    ),
    *plant(
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
    *plant(
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
    *plant(
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
    *plant(
        "figures",
        "contract.memory",
        "proof/test_memory",
        (
            "AdamW's state counted as one array",
            "len(SLOTS[run.optimizer]) * updated",
            "updated",
            "test_sgd_keeps_one_array_and_adamw_two",
        ),
    ),
)
