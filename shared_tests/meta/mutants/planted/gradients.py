"""Mistakes in how the diff follows gradients over the axes of a mesh, and tells what is kept."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

GRADIENTS = (
    *plant(
        "diff",
        "shardiff.diff.gradients",
        "tool/test_diff_gradients",
        (
            "a slice of any length",
            "len(differ) == 1 and differ[0][0] == differ[0][1] * parts",
            "len(differ) >= 1",
            "test_a_tensor_that_is_not_summed_once_over_every_axis_is_not_explained",
        ),
        (
            "tensors that are not summed over every axis",
            "if whole not in (there, there * inner[1]):",
            "if whole > there * inner[1]:",
            "test_a_tensor_that_is_not_summed_once_over_every_axis_is_not_explained",
        ),
        (
            "a slice of the first tensor that has one of that size",
            "next((a for a in fitting if is_slice(base, a, parts)), fitting[0])",
            "fitting[0]",
            "test_the_slice_of_one_tensor_is_not_taken_for_a_slice_of_another",
        ),
        (
            "tensors of a pipeline counted once",
            "(1, ticks))",
            "(1, ticks, 5))",
            "test_tensors_are_followed_through_every_tick_of_a_pipeline",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.extras",
        "tool/test_diff_gradients",
        (
            "an activation kept for a parameter",
            "agree(moves, others) and (None in",
            "(None in",
            "test_what_is_kept_is_what_would_be_gathered_again",
        ),
        (
            "an array kept for one of another shape",
            "long == longer or len(long) != len(longer))",
            "long or True)",
            "test_what_is_kept_is_what_would_be_gathered_again",
        ),
    ),
    *plant(
        "diff",
        "shardiff.diff.alignment",
        "tool/test_diff_partitioner",
        (
            "activations that add up to gradients of another phase",
            'return sense.same_phase or a.moves == b.moves or "activation" not in (a.moves, b.moves)',
            "return True",
            "test_activations_of_one_phase_are_no_gradients_of_another_whose_sizes_add_up",
        ),
    ),
)
