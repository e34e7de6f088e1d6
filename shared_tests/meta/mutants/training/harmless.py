"""Edits that change what is communicated, or who writes it, but no number."""

from __future__ import annotations

from shared_tests.meta.mutants.training.mutant import mutant

HARMLESS = (
    mutant(
        "layers gathered before the replicas' sum: whole gradients are summed, and then scattered",
        "torch_impl.compose",
        'return (chain(makers, "weights", layer, mesh) for layer in layers)',
        'return (chain(makers[::-1], "weights", layer, mesh) for layer in layers)',
        set(),
        strategy="fully_sharded",
        mesh="dp=2,fsdp=2",
        overlap=False,
    ),
    mutant(
        "f left out in shard_map: jax finds that a replicated array is used differently by every rank",
        "jax_impl.shard_map.megatron_tensor_parallel",
        "enter(x) @ w_up",
        "x @ w_up",
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
