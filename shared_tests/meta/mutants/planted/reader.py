"""Mistakes in the reading of HLO."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

READER = (
    *plant(
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
    *plant(
        "reader",
        "shardiff.hlo.loops",
        "tool/test_hlo_trips_run",
        (
            "LE counted as LT",
            'if direction in ("LE", "GE"):',
            'if direction == "GE":',
            "test_trips_are_those_of_running_the_loop",
        ),
    ),
    *plant(
        "reader",
        "shardiff.hlo.loops",
        "tool/test_hlo_flow",
        (
            "a bound that the outer loop changes is taken for constant",
            "body not in lookup.program.computations or increment(lookup, body, state) != 0",
            "body not in lookup.program.computations",
            "test_nested_loops_multiply_and_a_bound_may_come_from_the_outer_loops_state",
        ),
    ),
    *plant(
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
    *plant(
        "reader",
        "shardiff.hlo.records",
        "tool/test_hlo_bytes",
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
    ),
    *plant(
        "reader",
        "shardiff.hlo.records",
        "tool/test_hlo_async",
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
    *plant(
        "reader",
        "shardiff.hlo.instruction",
        "tool/test_hlo_bytes",
        (
            "packed elements rounded down to whole bytes",
            "return -(-size // 8)",
            "return size // 8",
            "test_bytes_are_the_logical_ones_of_every_type_and_layout",
        ),
    ),
    *plant(
        "reader",
        "shardiff.hlo.phases",
        "tool/test_hlo_phases",
        (
            "the transpose of jvp taken for jvp",
            'if "transpose(" in op_name or BACKWARD.search(op_name):',
            'if op_name.startswith("transpose(") or BACKWARD.search(op_name):',
            "test_phase_comes_from_op_name",
        ),
    ),
    *plant(
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
    *plant(
        "reader",
        "shardiff.hlo.operands",
        "tool/test_hlo_program",
        (
            "what a fusion joins is not followed out of it",
            "made = None if one.op_name else source(program, where, one.name)",
            "made = None",
            "test_a_collective_without_a_name_is_told_by_what_made_its_operand",
        ),
    ),
)
