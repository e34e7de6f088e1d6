"""Mistakes in what a step is predicted to take."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

PLANNER = (
    *plant(
        "planner",
        "shardiff.cost",
        "tool/test_network",
        (
            "groups of a host that do not share its links",
            "return min(self.inside.bandwidth, self.between.bandwidth / group.shared, self.limit(group))",
            "return min(self.inside.bandwidth, self.between.bandwidth, self.limit(group))",
            "test_groups_over_hosts_share_what_a_host_can_send",
        ),
        (
            "an all_reduce with the steps of an all_gather",
            'twice = 2 if op == "all_reduce" else 1',
            "twice = 1",
            "test_a_ring_inside_a_host_takes_its_wire_bytes_and_its_steps",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.simulate",
        "proof/test_planner",
        (
            "a message that does not wait for its receiver",
            "            self.sent[key] = message",
            "            self.traffic.enqueue(message, rank.time)",
            "test_a_message_moves_once_it_is_sent_and_its_receiver_is_ready",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.links",
        "proof/test_planner",
        (
            "transfers that do not share a link",
            "one.rate = min(one.of.most, *(link.bandwidth / link.weight for link, _ in one.of.parts))",
            "one.rate = min(one.of.most, *(link.bandwidth for link, _ in one.of.parts))",
            "test_transfers_on_one_link_share_it_and_the_first_of_them_ends_later",
        ),
        (
            "a collective that waits until the one before is done, where the library runs two",
            "(1 if line.waiting[0].message else self.network.together)",
            "1",
            "test_two_collectives_of_a_group_run_at_once_where_the_library_does_that",
        ),
        (
            "one direction that lags behind, and what follows does not",
            "line.lag = max(transfer.lag, line.lag if time < line.until else 0.0)",
            "line.lag = transfer.lag",
            "test_two_collectives_of_a_group_run_at_once_where_the_library_does_that",
        ),
        (
            "a burst that is never used up",
            "link.tokens -= free * weight",
            "link.tokens -= 0 * weight",
            "test_a_burst_passes_at_once_and_comes_back_while_the_link_is_idle",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.program",
        "proof/test_planner",
        (
            "the first layer's dX is computed",
            "(of_input and bool(i or one.input_grad))",
            "of_input",
            "test_a_step_without_communication_is_its_products_and_its_update",
        ),
        (
            "a bucket that is waited for at once",
            """                    self.pending.append(begin.key)
                    yield begin
            else:""",
            """                    yield from (begin, End(begin.key))
            else:""",
            "test_data_parallel_hides_all_buckets_but_what_the_backward_pass_does_not_cover",
        ),
        (
            "layers of a pair that are gathered one by one",
            "self.unit = unit_of(run)",
            "self.unit = min(1, unit_of(run))",
            "test_layers_that_are_taken_in_pairs_are_gathered_and_scattered_in_pairs",
        ),
        (
            "messages of a pipeline with the whole batch",
            "yield Send(message(action), target.stage, one.rows * size)",
            "yield Send(message(action), target.stage, built.run.problem.batch * size)",
            "test_what_rank_0_sends_is_what_the_closed_form_of_communication_says",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.instructions",
        "proof/test_planner",
        (
            "bytes of the wrong axis",
            "placed.add(axis.name, sent)",
            "placed.add(run.axes[0].name, sent)",
            "test_what_rank_0_sends_is_what_the_closed_form_of_communication_says",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.places",
        "proof/test_planner",
        (
            "the outermost axis inside a host",
            "for name, size in reversed(axes):",
            "for name, size in axes:",
            "test_groups_on_one_host_share_its_links_to_the_other",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.predict",
        "proof/test_planner",
        (
            "a pipeline without a bubble",
            'bubble = min(alone.bubble, waits.get("pp", 0.0))',
            "bubble = 0.0 * alone.bubble",
            "test_a_pipeline_whose_messages_take_no_time_takes_as_long_as_its_schedule_played",
        ),
        (
            "groups that share a link and stay in step",
            "everyone(run, machine.network) if drift_apart(machine.network) else placed",
            "placed if drift_apart(machine.network) else placed",
            "test_groups_take_turns_on_a_link_between_hosts_and_the_second_one_is_done_later",
        ),
        (
            "memory without the optimizer's state",
            "return sum(needed.to_json().values())",
            "return sum(needed.to_json().values()) - needed.optimizer_state",
            "test_a_mesh_that_does_not_fit_is_not_ranked",
        ),
    ),
    *plant(
        "planner",
        "contract.planner.work",
        "proof/test_planner",
        (
            "an update that leaves the optimizer's state alone",
            "(3 + 2 * len(SLOTS[run.optimizer]))",
            "(3 + 0 * len(SLOTS[run.optimizer]))",
            "test_a_step_without_communication_is_its_products_and_its_update",
        ),
    ),
)
