"""Mistakes in what all strategies share: model, optimizer and training loop."""

from __future__ import annotations

from shared_tests.meta.mutants.training.mutant import (
    ALL,
    GRADIENTS,
    LOSS,
    NORM,
    PARAMETERS,
    RAISES,
    SHARDS,
    STATE,
    UPDATE,
    mutant,
)

SHARED = (
    # torch, shared by all strategies
    mutant(
        "tanh gelu",
        "torch_impl.model",
        'approximate="none"',
        'approximate="tanh"',
        ALL,
        strategy="single_device",
        degree=1,
    ),
    mutant(
        "matrices multiplied in float32",
        "torch_impl.explicit.tensor_parallel",
        "gelu(x @ w + b)",
        "gelu((x.float() @ w.float()).double() + b)",
        ALL,
        optimizer="sgd",
    ),
    mutant(
        "parameters in float32",
        "torch_impl.train",
        "for a in layer) for layer in run.problem.parameters()]",
        "for a in layer) for layer in run.problem.parameters()]\n"
        "    full = [layer._make(a.float() for a in layer) for layer in full]",
        {RAISES},
        strategy="single_device",
        degree=1,
        words="dtype",
    ),
    mutant(
        "seed set again in every shard",
        "torch_impl.train",
        "run.problem.parameters()]",
        "type(run.problem)(**{**vars(run.problem), 'seed': dist.get_rank()}).parameters()]",
        ALL | {SHARDS},
        strategy="tensor_parallel",
    ),
    mutant(
        "parameters scaled by the local width",
        "torch_impl.train",
        "return make_leaves(split_params(full, mesh, run), device)",
        "d = run.world_size**0.5\n"
        "    return make_leaves([layer._replace(w=layer.w * d) for layer in split_params(full, mesh, run)], device)",
        ALL | {SHARDS},
        strategy="tensor_parallel",
    ),
    mutant(
        "AdamW's betas swapped",
        "torch_impl.train",
        "betas = (adamw.b1, adamw.b2)",
        "betas = (adamw.b2, adamw.b1)",
        {STATE},  # corrected for bias, the first update does not depend on them
        strategy="data_parallel",
    ),
    mutant(
        "weight decay coupled: Adam for AdamW",
        "torch_impl.train",
        "return torch.optim.AdamW, settings",
        "return torch.optim.Adam, settings",
        UPDATE,
        strategy="data_parallel",
    ),
    mutant(
        "learning rate scaled by the number of ranks",
        "torch_impl.train",
        '"lr": sgd.lr,',
        '"lr": sgd.lr * run.world_size,',
        {PARAMETERS},
        strategy="data_parallel",
        optimizer="sgd",
    ),
    mutant(
        "replicas counted in the gradient norm",
        "torch_impl.train",
        "for t, own in pairs if own)",
        "for t, own in pairs)",
        {NORM},
        strategy="data_parallel",
    ),
    mutant(
        "gradients of the last step reported as the first's",
        "torch_impl.train",
        "if step == 0:",
        "if step == run.steps - 1:",
        {GRADIENTS},
        strategy="data_parallel",
        steps=2,
    ),
    mutant(
        "every step on the first step's batch",
        "torch_impl.train",
        "run.problem.data(step)",
        "run.problem.data(0)",
        UPDATE | {LOSS, NORM},
        strategy="data_parallel",
        steps=2,
    ),
    # JAX, shared by both sides
    mutant(
        "tanh gelu, in JAX",
        "jax_impl.model",
        "approximate=False",
        "approximate=True",
        ALL,
        strategy="single_device",
        degree=1,
    ),
    mutant(
        "AdamW's epsilon inside the root",
        "jax_impl.train",
        "adamw.b2, adamw.eps, weight_decay",
        "adamw.b2, 0.0, adamw.eps, weight_decay",
        {PARAMETERS},
        strategy="data_parallel",
    ),
    mutant(
        "Nesterov's momentum",
        "jax_impl.train",
        "optax.sgd(sgd.lr, sgd.momentum)",
        "optax.sgd(sgd.lr, sgd.momentum, nesterov=True)",
        {PARAMETERS},
        strategy="data_parallel",
        optimizer="sgd",
    ),
)
