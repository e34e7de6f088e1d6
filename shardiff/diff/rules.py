"""The rules of a diff, by name: what happened to some records, and why the program is still the same one."""

from __future__ import annotations

from collections.abc import Sequence

from shardiff.record import PHASES, Record

OTHER_RANKS = "other_ranks"
WHY = {
    "unfused_reduce_scatter": "an all_reduce, of which each rank keeps its slice, gives the sums that a reduce_scatter "
    "gives, for twice the wire bytes",
    "fused_reduce_scatter": "only a slice of the sum is used, so a reduce_scatter is enough, for half the wire bytes",
    "decomposed_all_reduce": "a reduce_scatter followed by an all_gather is an all_reduce, for the same bytes",
    "recomposed_all_reduce": "an all_reduce is a reduce_scatter followed by an all_gather, for the same bytes",
    "gather_by_sum": "each rank adds its part to zeros, which gathers the parts, for twice the wire bytes",
    "broadcast_by_sum": "every rank but the root adds zeros, which is a broadcast, for up to twice the wire bytes",
    "broadcasts_as_gather": "each rank broadcasts what it owns, or all gather it at once: every rank has all of it",
    "ring": "n - 1 permutes of one n-th each are an all_gather, or a reduce_scatter, step by step: the same bytes",
    "one_peer": "an all_to_all between two ranks exchanges one half of the data, as a permute does: the same bytes",
    "joined_axes": "one all_reduce over the product of several axes gives the sum that one after another gives",
    "reduced_before_scattered": "the whole tensor is reduced over the outer axis where its scattered shard would do: "
    "the same sums, for more bytes",
    "scattered_before_reduced": "only the scattered shard is reduced over the outer axis, not the whole tensor: the "
    "same sums, for fewer bytes",
    "gather_and_scatter": "every rank gathers all tokens, or scatters its sums, rather than exchange with an "
    "all_to_all only what the others need: the same values, for more bytes",
    "weight_gathered": "the weights are gathered to where the activations are, rather than activations exchanged",
    "samples_gathered": "every rank computes its part of a weight's gradient from all samples, which are gathered, "
    "instead of a part for its own samples, which are then summed",
    "summed_early": "the sum over the ranks is taken before a linear operation instead of after it: the same values, "
    "for more bytes; a gradient that is computed from them then needs no sum",
    "run_whole": "the compiler does not split this operation, so every rank gathers its input and computes all of it",
    "resharded": "two operations want the same tensor in different layouts, so it is moved from one to the other; no "
    "line of the program asks for that",
    "combined": "several collectives became one, operand by operand: the same bytes, and the latency is paid once",
    "split": "one collective became several: the same bytes",
    "regrouped": "the same bytes in total, combined and split in another way",
    "loop": "one instruction in a loop stands for as many calls as the loop has trips",
    "dtype": "the data have a different type on the wire",
    "averaged": "a mean is a sum, divided before or after",
    "moved": "the same data, sent in a different phase",
    "edges": "a permute along more edges in one call: no rank sends more",
    "more_groups": "all groups of ranks along the axis take part, as every device of an SPMD program runs the same "
    "code, where only some of them have a use for it",
    "gathered_again": "gathered a second time instead of kept since the forward pass: less memory, more bytes",
    "recomputed": "the backward pass computes a part of the forward pass again, communication included: less memory, "
    "more bytes",
    "sent_again": "sent around the ring a second time instead of kept since the forward pass: less memory, more bytes",
    "homeward": "the gradients of what went around a ring of n ranks go on around it with the data, in n permutes, or "
    "alone and back the way the data came, in n - 1",
    "kept": "kept since the forward pass instead of gathered or computed a second time: more memory, fewer bytes",
    "reduced_one_by_one": "the addends of a sum are reduced over the ranks one by one, instead of added up first: the "
    "same sum, for more bytes",
    "added_first": "the addends of a sum are added up on each rank before they are reduced: the same sum, for fewer "
    "bytes",
    "bubble_ticks": "every stage communicates in every tick of a pipeline, also in those of the bubble, whose data "
    "nobody uses",
    "reduced_every_tick": "what each tick of a pipeline adds to a sum is reduced over the ranks, instead of the whole "
    "sum once after the last tick",
    "gathered_every_tick": "parameters are gathered in each tick of a pipeline, instead of once for all microbatches",
    "global_value": "a single number, such as the loss: in a program that is written for all devices at once it is "
    "that of the whole batch, which is summed over the ranks; where each rank runs its own program, each has its own",
    OTHER_RANKS: "the same collective among other ranks, which is another program unless one mesh maps to the other",
}


def labels(left: str, right: str) -> tuple[str, str]:
    """What the sides are called: "left" and "right" where the programs have no labels, or the same one."""
    return (left, right) if left and right and left != right else ("left", "right")


def sentence(rule: str, left: Sequence[Record], right: Sequence[Record], labels: tuple[str, str]) -> str:
    """What became of the records of a row under one rule, and why that is equal. labels: what the sides are called."""

    def types(records: Sequence[Record]) -> str:
        found = {kind for record in records for kind in [part.dtype for part in record.parts] or [record.dtype]}
        return "/".join(sorted(found))

    def phases(records: Sequence[Record]) -> str:
        return "/".join(sorted({record.phase for record in records}, key=PHASES.index))

    text = WHY[rule]
    if rule == "dtype":
        text += f" ({labels[0]}: {types(left)}; {labels[1]}: {types(right)})"
    if rule == "moved":
        text += f" ({labels[0]}: {phases(left)}; {labels[1]}: {phases(right)})"
    return text
