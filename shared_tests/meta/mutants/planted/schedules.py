"""Mistakes in schedules of pipelines, in their messages and in their slots."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

DEADLOCK = "contract.schedule_time.Deadlock: deadlock"

SCHEDULES = (
    *plant(
        "schedules",
        "contract.schedule",
        "proof/test_schedule",
        (
            "backward passes before forward passes",
            'for kind in ("forward", "backward"):\n        for i',
            'for kind in ("backward", "forward"):\n        for i',
            "test_every_schedule_is_complete_and_in_an_order_that_can_finish",
            DEADLOCK,
        ),
        (
            "microbatches in the opposite order",
            'for kind in ("forward", "backward"):\n        for i in range(microbatches):',
            'for kind in ("forward", "backward"):\n        for i in reversed(range(microbatches)):',
            "test_every_stage_runs_all_forward_passes_and_then_all_backward_passes_in_order",
        ),
        (
            "1F1B's warm-up off by one",
            "    ahead = min(stages - stage - 1, microbatches)\n    for",
            "    ahead = min(stages - stage, microbatches)\n    for",
            "test_the_peak_counted_is_the_closed_form_s",
        ),
        (
            "interleaved with the warm-up of one chunk",
            "min((chunks - 1) * stages + 2 * (stages - stage - 1), total)",
            "min(stages - stage - 1, total)",
            "test_every_schedule_is_complete_and_in_an_order_that_can_finish",
            DEADLOCK,
        ),
        (
            "chunks backward in the order of forward",
            'chunk = chunk if kind == "forward" else chunks - 1 - chunk',
            "chunk = int(chunk)",
            "test_every_schedule_is_complete_and_in_an_order_that_can_finish",
            DEADLOCK,
        ),
        (
            "no W is put off",
            "if done >= stage:",
            "if done >= 0:",
            "test_the_peak_counted_is_the_closed_form_s",
        ),
        (
            "W before its B",
            "yield from (*b(0), *w(0), *f(1), *b(1), *w(1))",
            "yield from (*w(0), *b(0), *f(1), *b(1), *w(1))",
            "test_every_schedule_is_complete_and_in_an_order_that_can_finish",
            DEADLOCK,
        ),
        (
            "W forgotten for the last microbatch",
            "for i in range(weights, microbatches):",
            "for i in range(weights, microbatches - 1):",
            "test_every_schedule_is_complete_and_in_an_order_that_can_finish",
            "ValueError: ",
        ),
        (
            "the V's second chunks dealt out in turn",
            "for stage in reversed(range(stages))",
            "for stage in range(stages)",
            "test_where_the_parts_live",
        ),
        (
            "a backward pass needs no forward pass",
            "return [*([source] if source else []), *([action._replace(kind=own)] if own else [])]",
            "return [*([source] if source else [])]",
            "test_a_wrong_order_is_found",
        ),
    ),
    *plant(
        "schedules",
        "contract.schedule_time",
        "proof/test_schedule",
        (
            "a pass may run in the tick of what it needs",
            "when.get(need, tick) >= tick",
            "when.get(need, tick + 1) > tick",
            "test_wrong_ticks_are_found",
        ),
        (
            "an action starts before what it needs has ended",
            "*(done[need][1] for need in needs)",
            "*(done[need][0] for need in needs)",
            "test_the_bubble_by_hand",
        ),
        (
            "activations freed by B although W needs them",
            'last = "backward_weight" if schedule.split else "backward"',
            'last = "backward_input" if schedule.split else "backward"',
            "test_the_peak_counted_is_the_closed_form_s",
        ),
        (
            "ZB-H1's bubble that of 1F1B",
            "Fraction(f + b - w)",
            "Fraction(f + b + w)",
            "test_the_bubble_counted_is_the_closed_form_s",
        ),
        (
            "interleaved's bubble not divided by the chunks",
            "Fraction(f + b + w, chunks)",
            "Fraction(f + b + w)",
            "test_the_bubble_counted_is_the_closed_form_s",
        ),
        (
            "1F1B keeps m microbatches",
            '"1f1b": min(p - s, m), "zb_h1"',
            '"1f1b": m, "zb_h1"',
            "test_the_peak_counted_is_the_closed_form_s",
        ),
    ),
    *plant(
        "schedules",
        "contract.messages",
        "proof/test_messages",
        (
            "a send posted before the receives that come first",
            "                post(position[action], peer)\n",
            "",
            "test_both_sides_of_a_pair_post_their_transfers_in_one_order",
            DEADLOCK,
        ),
        (
            "the loss summed before the forward passes are done",
            "if i == last_forward:",
            "if i == 0:",
            "test_without_a_backward_pass_only_activations_are_sent",
        ),
        (
            "a message no higher than what its stage has waited for",
            "clock[stage] = max(clock[stage], level[source])",
            "clock[stage] = max(clock[stage], 0)",
            "test_a_message_is_above_what_its_stage_has_waited_for",
        ),
    ),
    *plant(
        "schedules",
        "contract.slots",
        "proof/test_schedule",
        (
            "a residual's slot reused too early",
            "action._replace(kind=last)], action))",
            "action._replace(kind=last)] - 2, action))",
            "test_no_slot_is_taken_before_it_is_free_and_residuals_are_as_many_as_the_peak",
        ),
        (
            "every residual in a slot of its own",
            "if busy < start), len(until))",
            "if busy < 0), len(until))",
            "test_no_slot_is_taken_before_it_is_free_and_residuals_are_as_many_as_the_peak",
        ),
    ),
    *plant(
        "schedules",
        "contract.memory",
        "proof/test_pipelines",
        (
            "nothing kept between B and W",
            "now += rows * (put_off[action.chunk] - whole[action.chunk])",
            "now -= rows * whole[action.chunk]",
            "test_what_is_kept_is_the_closed_form_s_to_the_byte",
        ),
    ),
    *plant(
        "schedules",
        "contract.strategies.pipeline_parallel",
        "proof/test_cost",
        (
            "the smallest microbatch of a tick counts",
            "most = max(rows[action.microbatch] for action in together)",
            "most = min(rows[action.microbatch] for action in together)",
            "test_an_uneven_microbatch_counts_with_the_largest_of_its_tick",
        ),
        (
            "the scanned pipeline stops before its last tick",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 1",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 2",
            "test_annotated_pipeline_permutes_in_every_tick",
        ),
    ),
)
