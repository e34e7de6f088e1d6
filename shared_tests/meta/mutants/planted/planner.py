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
    ),
)
