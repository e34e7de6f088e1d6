"""Edits that change what is communicated, or who writes it, but no number."""

from __future__ import annotations

from shared_tests.meta.mutants.training.mutant import mutant

HARMLESS = (
    mutant(
        "split outermost first: none of these strategies cuts a dim that another has cut",
        "torch_impl.compose",
        "for strategy in reversed(strategies):\n        if hasattr",
        "for strategy in strategies:\n        if hasattr",
        set(),
        strategy="megatron_tensor_parallel",
        mesh="dp=2,tp=2",
    ),
    mutant(
        "f left out in shard_map: jax finds that a replicated array is used differently by every rank",
        "jax_impl.shard_map.megatron_tensor_parallel",
        "x = varying(x, AXIS)",
        "pass",
        set(),
    ),
    mutant(
        "targets whole on every rank: an annotation says where an array lies, not what is computed",
        "jax_impl.annotated.tensor_parallel",
        '    "features": AXIS,',
        "",
        set(),
    ),
    mutant(
        "backward passes of a pipeline in the opposite order on every stage",
        "torch_impl.explicit.pipeline_parallel",
        "passes.backward(saved.pop((chunk, i)), received)",
        "passes.backward(saved.pop((chunk, schedule.microbatches - 1 - i)), received)",
        set(),
    ),
)
