"""Mistakes in jax_impl, each tried with one strategy."""

from __future__ import annotations

from shared_tests.meta.mutants.training.mutant import ALL, BACKWARD, RAISES, mutant

JAX = (
    # shard_map
    mutant(
        "gradients reduced again",
        "jax_impl.compose",
        "for strategy in replicates:  # only the shards are summed over replicas\n",
        "for strategy in load(run):\n                grads = jax.tree.map(lambda g: varying(g, 'dp'), grads)\n",
        BACKWARD,
        strategy="data_parallel",
    ),
    mutant(
        "sum over ranks instead of mean over samples, in shard_map",
        "jax_impl.shard_map.data_parallel",
        "return all_reduce(share, AXIS)",
        "return 2 * all_reduce(share, AXIS)",
        ALL,
        optimizer="sgd",
    ),
    mutant(
        "loss not summed over the ranks, in shard_map",
        "jax_impl.shard_map.data_parallel",
        "return all_reduce(share, AXIS)",
        "return share",
        {RAISES},
        words="out_specs|PyTreeDef",
    ),
    mutant(
        "a gather forgotten, in shard_map",
        "jax_impl.shard_map.tensor_parallel",
        "if x.shape[1] < w.shape[0]:",
        "if False:",
        {RAISES},
        words="dot_general",
    ),
    mutant(
        "row bias added on every rank, in shard_map",
        "jax_impl.shard_map.megatron_tensor_parallel",
        "leave(h @ w_down)",
        "leave(h @ w_down + b_down)",
        ALL,
        more=(("gelu(y + b_down)", "gelu(y)"),),
    ),
    mutant(
        "activations permuted the wrong way",
        "jax_impl.shard_map.pipeline_parallel",
        "(s, s + 1)",
        "(s + 1, s)",
        ALL,
    ),
    mutant(
        "loss of every stage",
        "jax_impl.shard_map.pipeline_parallel",
        "jnp.where(stage == last, error, 0)",
        "error",
        ALL,
    ),
    mutant(
        "layers that only fill up a stage are run",
        "jax_impl.compose",
        "x = jnp.where(there, through(forward, layers[j : j + unit], x, run), x)",
        "x = through(forward, layers[j : j + unit], x, run)",
        ALL,
        strategy="pipeline_parallel",
        layers=5,
    ),
    mutant(
        "every stage sends the gradient of a loss",
        "jax_impl.ticks",
        "out = jnp.where(stage == last_stage, grad, out)",
        "out = grad",
        ALL,
        strategy="pipeline_parallel",
        schedule="1f1b",
        layers=2,
    ),
    mutant(
        "residuals of the first microbatch for all",
        "jax_impl.ticks",
        'a._replace(kind="forward") for a in row]',
        'a._replace(kind="forward", microbatch=0) for a in row]',
        BACKWARD,
        strategy="pipeline_parallel",
        schedule="1f1b",
        layers=2,
    ),
    # annotated
    mutant(
        "rows split instead of columns",
        "jax_impl.annotated.tensor_parallel",
        '"up_out": AXIS',
        '"up_in": AXIS',
        {RAISES},
        words="where the layout says",
    ),
    mutant(
        "buffer shifted the wrong way",
        "jax_impl.annotated.pipeline_parallel",
        "((1, -1, 0), ",
        "((-1, 1, 0), ",
        ALL,
    ),
    mutant(
        "targets not delayed by the stages",
        "jax_impl.annotated.pipeline_parallel",
        "((stages - 1, 0), *rest)",
        "((0, stages - 1), *rest)",
        ALL,
    ),
    mutant(
        "loss of every stage, annotated",
        "jax_impl.annotated.pipeline_parallel",
        "errors * (jnp.arange(stages) == stages - 1)",
        "errors",
        ALL,
    ),
    mutant(
        "rows that only fill up a shard are counted",
        "jax_impl.specs",
        "return place(pad_batch(batch, shares), batch_specs(run), mesh)",
        "padded = pad_batch(batch, shares)\n    padded = padded._replace(weight=padded.weight * 0 + batch.weight[0])\n"
        "    return place(padded, batch_specs(run), mesh)",
        ALL,
        batch=7,
        strategy="data_parallel",
    ),
)
