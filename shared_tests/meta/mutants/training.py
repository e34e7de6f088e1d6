"""Mistakes in how a model is trained, and exactly those claims of a run that each of them fails.

A mutant is an edit in the source of one module. A small float64 run with the edited module is compared with the
reference as every run is. A claim that fails proves that the suite would notice the mistake. A claim that still holds
shows where the mistake hides: AdamW, for example, makes the same first update whatever the scale of the gradient is,
apart from rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.problem import Problem
from contract.strategy import Run, one_axis, parse_axes
from shared_tests.edited import Edit

# Claims of contract.proof and of the shards, and two ways to end without a result.
LOSS, GRADIENTS, NORM = "loss", "gradients", "gradient norm"
PARAMETERS, STATE = "parameters", "optimizer state"
REPLICAS, SHARDS, DTYPE = "replicas", "shards", "dtype"
RAISES, STUCK = "raises", "stuck"
UPDATE = frozenset({PARAMETERS, STATE})
BACKWARD = UPDATE | {GRADIENTS, NORM}
ALL = BACKWARD | {LOSS}


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong. edits: (old, new) in the source of `module`; each old occurs once. claims: those that fail.

    words: part of the error's text, for a mutant that raises. The rest describes the run: one strategy over `degree`
    ranks, or the strategies of `mesh`. of_both: the implementation, for a module that both JAX implementations share.
    """

    name: str
    module: str
    edits: tuple[Edit, ...]
    claims: frozenset[str]
    strategy: str
    degree: int = 2
    mesh: str = ""
    of_both: str = "shard_map"
    optimizer: str = "adamw"
    steps: int = 1
    batch: int = 8
    layers: int = 4
    microbatches: int = 2
    overlap: bool = True
    words: str = ""

    @property
    def run(self) -> Run:
        package, *path = self.module.split(".")
        named = path[0] if path[0] in ("shard_map", "annotated") else self.of_both
        return Run(
            "torch" if package == "torch_impl" else named,
            parse_axes(self.mesh, (self.strategy,)) if self.mesh else one_axis(self.strategy, self.degree),
            Problem(self.batch, 8, self.layers, "float64"),
            self.optimizer,
            self.steps,
            self.microbatches,
            self.overlap,
            device="cpu",
        )


def mutant(name: str, module: str, old: str, new: str, claims: frozenset[str] | set[str], **rest: Any) -> Mutant:
    """A mutant with one edit. Without `strategy`, the strategy is the module's."""
    rest.setdefault("strategy", module.rpartition(".")[2])
    edits = rest.pop("more", ())
    return Mutant(name, module, ((old, new), *edits), frozenset(claims), **rest)


GRAD_INSIDE = """
    @jax.shard_map(mesh=mesh, in_specs=(params_specs(run), batch_specs(run)), out_specs=(P(), params_specs(run)))
    def inside(params: list[Layer], batch: Batch) -> tuple[Array, list[Layer]]:
        def share(params: list[Layer]) -> Array:
            return squared_error(model.forward(params, batch.x), batch)

        part, grads = jax.value_and_grad(share)(params)
        return lax.psum(part, "dp"), jax.tree.map(lambda g: lax.psum(g, "dp"), grads)

    return inside(params, batch)
"""

MUTANTS = (
    # torch, data parallel
    mutant(
        "sum over ranks instead of mean over samples",
        "torch_impl.explicit.data_parallel",
        "batch.weight[mine]",
        "batch.weight[mine] * mesh.size(AXIS)",
        ALL,
        optimizer="sgd",
    ),
    mutant(
        "sum over ranks instead of mean over samples, under AdamW",
        "torch_impl.explicit.data_parallel",
        "batch.weight[mine]",
        "batch.weight[mine] * mesh.size(AXIS)",
        ALL,  # the parameters by way of epsilon alone: in float32 they would pass
    ),
    mutant(
        "uneven batch averaged by ranks",
        "torch_impl.explicit.data_parallel",
        "batch.weight[mine]",
        "batch.weight[mine] * len(batch.x) / (mesh.size(AXIS) * len(batch.x[mine]))",
        ALL,
        degree=4,
        batch=10,
    ),
    mutant(
        "missing backward all_reduce of the weights",
        "torch_impl.explicit.data_parallel",
        "Layer(*(identity_all_reduce(p, mesh.group(AXIS)) for p in layer))",
        "Layer(layer.w, identity_all_reduce(layer.b, mesh.group(AXIS)))",
        BACKWARD | {REPLICAS},
        overlap=False,
    ),
    mutant(
        "gradients reduced twice",
        "torch_impl.explicit.data_parallel",
        "identity_all_reduce(p, mesh.group(AXIS)) for",
        "identity_all_reduce(identity_all_reduce(p, mesh.group(AXIS)), mesh.group(AXIS)) for",
        BACKWARD,
        overlap=False,
    ),
    mutant(
        "stale bucket: the first step's gradients sent again",
        "torch_impl.buckets",
        "p.grad = part.view_as(p).copy_(p.grad)",
        "p.grad = part.view_as(p).copy_(globals().setdefault('FIRST', {}).setdefault(p, p.grad))",
        UPDATE | {NORM},  # the gradients compared are the first step's
        steps=2,
        strategy="data_parallel",
    ),
    mutant(
        "bucket sent before it is complete",
        "torch_impl.buckets",
        "missing[len(sent)] == 0",
        "missing[len(sent)] <= 1",
        BACKWARD | {REPLICAS},
        more=(("async_op=True))", "async_op=True)), sent[-1].wait()"),),  # at once, lest it be too late by luck
        strategy="data_parallel",
    ),
    mutant(
        "buckets summed but not handed back",
        "torch_impl.buckets",
        "p.grad = part.view_as(p).copy_(p.grad)",
        "part.view_as(p).copy_(p.grad)",
        BACKWARD | {REPLICAS},
        strategy="data_parallel",
    ),
    mutant(
        "loss summed in a bucket but not handed back",
        "torch_impl.buckets",
        "total.copy_(parts[-1][-1].view_as(total))",
        "pass",
        {RAISES},
        words="rank 1 has losses",
        strategy="data_parallel",
    ),
    mutant(
        "every rank takes the first share of the batch",
        "torch_impl.explicit.data_parallel",
        "[mesh.rank(AXIS)]",
        "[0]",
        ALL,
    ),
    # torch, tensor parallel
    mutant(
        "a gather forgotten",
        "torch_impl.explicit.tensor_parallel",
        "if x.shape[1] < w.shape[0]:",
        "if False:",
        {RAISES},
        words="shapes cannot be multiplied",
    ),
    mutant(
        "loss not summed over the ranks",
        "torch_impl.explicit.tensor_parallel",
        "return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)",
        "return None",
        {RAISES},
        words="rank 1 has losses",
    ),
    mutant(
        "blocks gathered in the wrong order",
        "torch_impl.collectives",
        "blocks.movedim(0, dim)",
        "blocks.flip(0).movedim(0, dim)",
        ALL,
        strategy="tensor_parallel",
    ),
    mutant(
        "blocks scattered in the wrong order",
        "torch_impl.collectives",
        ".movedim(dim, 0).contiguous()",
        ".movedim(dim, 0).flip(0).contiguous()",
        BACKWARD,
        strategy="tensor_parallel",
    ),
    mutant(
        "backward of a gather takes its own block instead of the sum",
        "torch_impl.collectives",
        "return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None",
        "return grads[0].chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None",
        BACKWARD,
        strategy="tensor_parallel",
    ),
    mutant(
        "targets of another rank's columns",
        "torch_impl.explicit.tensor_parallel",
        "batch.y.chunk(n, dim=1)[rank]",
        "batch.y.chunk(n, dim=1)[rank - 1]",
        ALL,
    ),
    # torch, Megatron
    mutant(
        "row bias added on every rank",
        "torch_impl.explicit.megatron_tensor_parallel",
        "all_reduce_identity(h @ w_down, group)",
        "all_reduce_identity(h @ w_down + b_down, group)",
        ALL,
        more=(("gelu(y + b_down)", "gelu(y)"),),
    ),
    mutant(
        "missing f: gradients of a pair's input not summed",
        "torch_impl.explicit.megatron_tensor_parallel",
        "x = identity_all_reduce(x, group)",
        "pass",
        BACKWARD | {REPLICAS},
    ),
    mutant(
        "f and g swapped: summed backward instead of forward",
        "torch_impl.explicit.megatron_tensor_parallel",
        "all_reduce_identity(h @ w_down, group)",
        "identity_all_reduce(h @ w_down, group)",
        {RAISES},
        words="rank 1 has losses",
    ),
    mutant(
        "backward of g reduces once more",
        "torch_impl.collectives",
        "        return grads[0], None\n",
        "        return all_reduce(grads[0].clone(), dist.group.WORLD), None\n",
        BACKWARD,
        strategy="megatron_tensor_parallel",
    ),
    # torch, pipeline
    mutant(
        "per-microbatch loss not rescaled",
        "torch_impl.explicit.pipeline_parallel",
        "loss(out, parts[i])",
        "loss(out, parts[i]) * microbatches",
        ALL,
    ),
    mutant(
        "microbatch gradients overwritten instead of accumulated",
        "torch_impl.explicit.pipeline_parallel",
        "                out.backward(received)\n",
        "                [setattr(p, 'grad', None) for layer in forward.__closure__[1].cell_contents for p in layer]\n"
        "                out.backward(received)\n",
        BACKWARD,
    ),
    mutant(
        "loss of the last microbatch alone",
        "torch_impl.explicit.pipeline_parallel",
        "share += out.detach()",
        "share = out.detach()",
        {LOSS},
    ),
    mutant(
        "activations sent the wrong way",
        "torch_impl.explicit.pipeline_parallel",
        'return stage + 1 if action.kind == "forward" else stage - 1',
        'return stage - 1 if action.kind == "forward" else stage + 1',
        {STUCK},
    ),
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
        "for a in layer)) for layer in run.problem.parameters()]",
        "for a in layer)) for layer in run.problem.parameters()]\n"
        "    full = [Layer(w.float(), b.float()) for w, b in full]",
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
        "    return make_leaves([Layer(w * d, b) for w, b in split_params(full, mesh, run)], device)",
        ALL | {SHARDS},
        strategy="tensor_parallel",
    ),
    mutant(
        "AdamW's betas swapped",
        "torch_impl.train",
        "betas=(adamw.b1, adamw.b2)",
        "betas=(adamw.b2, adamw.b1)",
        {STATE},  # corrected for bias, the first update does not depend on them
        strategy="data_parallel",
    ),
    mutant(
        "weight decay coupled: Adam for AdamW",
        "torch_impl.train",
        "torch.optim.AdamW(",
        "torch.optim.Adam(",
        UPDATE,
        strategy="data_parallel",
    ),
    mutant(
        "learning rate scaled by the number of ranks",
        "torch_impl.train",
        "lr=sgd.lr",
        "lr=sgd.lr * run.world_size",
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
    # shard_map
    mutant(
        "gradient taken inside shard_map, and reduced again",
        "jax_impl.compose",
        "\n    return jax.value_and_grad(loss)(params, batch, mesh, run)\n",
        GRAD_INSIDE,
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
        words="out_specs",
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
        "all_reduce(h @ w_down, AXIS)",
        "all_reduce(h @ w_down + b_down, AXIS)",
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
        "x = jnp.where(jnp.asarray(exists)[stage, j], forward(layers[j * unit : (j + 1) * unit], x), x)",
        "x = forward(layers[j * unit : (j + 1) * unit], x)",
        ALL,
        strategy="pipeline_parallel",
        layers=5,
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
        "state[:-1], ((1, 0), ",
        "state[1:], ((0, 1), ",
        ALL,
    ),
    mutant(
        "targets not delayed by the stages",
        "jax_impl.annotated.pipeline_parallel",
        "(bubble[0][::-1], *bubble[1:])",
        "bubble",
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
        "jax_impl.compose",
        "return place(pad_batch(batch, shares), batch_specs(run), mesh)",
        "padded = pad_batch(batch, shares)\n    padded = padded._replace(weight=padded.weight * 0 + batch.weight[0])\n"
        "    return place(padded, batch_specs(run), mesh)",
        ALL,
        batch=7,
        strategy="data_parallel",
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
    # several strategies on one mesh
    mutant(
        "gradients summed over the wrong axis",
        "torch_impl.compose",
        "mesh.group(deferred[0].AXIS)",
        "mesh.group(strategies[-1].AXIS)",
        {RAISES},
        strategy="tensor_parallel",
        mesh="dp=2,tp=2",
        words="rank 2 has losses",
    ),
    mutant(
        "gradients of replicas summed over the wrong axis",
        "torch_impl.explicit.data_parallel",
        "identity_all_reduce(p, mesh.group(AXIS))",
        "identity_all_reduce(p, mesh.group('tp'))",
        BACKWARD | {REPLICAS},
        strategy="megatron_tensor_parallel",
        mesh="dp=2,tp=2",
        overlap=False,
    ),
    mutant(
        "loss summed over one axis too few",
        "torch_impl.compose",
        'for s in reversed(strategies) if hasattr(s, "total")]',
        'for s in reversed(strategies[1:]) if hasattr(s, "total")]',
        {RAISES},
        strategy="tensor_parallel",
        mesh="dp=2,tp=2",
        overlap=False,
        words="rank 2 has losses",
    ),
    mutant(
        "loss summed over one axis too many",
        "torch_impl.explicit.megatron_tensor_parallel",
        "def forward(",
        "def total(share, mesh):\n    import torch.distributed as dist\n\n"
        "    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)\n\n\ndef forward(",
        {LOSS},
        strategy="megatron_tensor_parallel",
        mesh="dp=2,tp=2",
    ),
    mutant(
        "gradients synchronized after the first microbatch",
        "torch_impl.buckets",
        "if seen[id(p)] < passes:",
        "if False:",
        BACKWARD | {REPLICAS},
        strategy="data_parallel",
        mesh="dp=2,pp=2",
        more=(("async_op=True))", "async_op=True)), sent[-1].wait()"),),  # at once, lest it be too late by luck
    ),
    mutant(
        "a rank's place in the world taken for that on the axis",
        "torch_impl.mesh",
        "return self.groups[axis].rank()",
        "return torch.distributed.get_rank() % self.groups[axis].size()",
        ALL | {SHARDS, REPLICAS},
        strategy="tensor_parallel",
        mesh="tp=2,dp=2",
    ),
    mutant(
        "a stage that parts a pair of layers",
        "torch_impl.mesh",
        "for name in run.mesh.names}, unit_of(run))",
        "for name in run.mesh.names}, 1)",
        {RAISES},
        strategy="megatron_tensor_parallel",
        mesh="pp=2,tp=2",
        layers=6,
        words="zip() argument 2 is",
    ),
    mutant(
        "loss summed over one axis too few, in shard_map",
        "jax_impl.compose",
        'return chain(strategies, "total", squared_error(forward(used, batch.x), batch))',
        'return chain(strategies[1:], "total", squared_error(forward(used, batch.x), batch))',
        {RAISES},
        strategy="tensor_parallel",
        mesh="dp=2,tp=2",
        words="out_specs",
    ),
    mutant(
        "loss summed over one axis too many, in shard_map",
        "jax_impl.shard_map.megatron_tensor_parallel",
        "def forward(",
        "def total(share):\n    return all_reduce(share, AXIS)\n\n\ndef forward(",
        ALL,
        strategy="megatron_tensor_parallel",
        mesh="dp=2,tp=2",
        optimizer="sgd",
    ),
    mutant(
        "inner strategy's split forgotten in a stack of stages",
        "jax_impl.compose",
        "P(pipeline.AXIS, *spec) for spec in layer",
        "P(pipeline.AXIS) for spec in layer",
        {RAISES},
        strategy="tensor_parallel",
        mesh="pp=2,tp=2",
    ),
    mutant(
        "only the outer strategy's rules",
        "jax_impl.compose",
        "for strategy in reversed(strategies):\n        for logical",
        "for strategy in strategies[:1]:\n        for logical",
        {RAISES},
        strategy="tensor_parallel",
        mesh="dp=2,tp=2",
        words="where the layout says",
        of_both="annotated",
    ),
)

# Edits that change what is communicated, or who writes it, but no number.
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
        "saved.pop(i)",
        "saved.pop(microbatches - 1 - i)",
        set(),
    ),
)
