"""Mistakes in torch_impl, each tried with one strategy."""

from __future__ import annotations

from shared_tests.meta.mutants.training.mutant import ALL, BACKWARD, LOSS, NORM, RAISES, REPLICAS, STUCK, UPDATE, mutant

TORCH = (
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
        "layer._make(identity_all_reduce(p, mesh.group(AXIS)) for p in layer)",
        "layer._replace(b=identity_all_reduce(layer.b, mesh.group(AXIS)))",
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
        "total.copy_(flats[-1][-1])",
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
        "leave(h @ w_down, mesh)",
        "leave(h @ w_down + b_down, mesh)",
        ALL,
        more=(("gelu(y + b_down)", "gelu(y)"),),
    ),
    mutant(
        "missing f: gradients of a pair's input not summed",
        "torch_impl.explicit.megatron_tensor_parallel",
        "enter(x, mesh) @ w_up",
        "x @ w_up",
        BACKWARD | {REPLICAS},
    ),
    mutant(
        "f and g swapped: summed backward instead of forward",
        "torch_impl.explicit.megatron_tensor_parallel",
        "leave(h @ w_down, mesh)",
        "enter(h @ w_down, mesh)",
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
        "loss(final(x), parts[i])",
        "loss(final(x), parts[i]) * schedule.microbatches",
        ALL,
    ),
    mutant(
        "microbatch gradients overwritten instead of accumulated",
        "torch_impl.explicit.pipeline_parallel",
        "            return passes.backward(saved.pop((chunk, i)), received)\n",
        "            [setattr(p, 'grad', None) for each in chunks[chunk] for layer in each.args[0] for p in layer]\n"
        "            return passes.backward(saved.pop((chunk, i)), received)\n",
        BACKWARD,
    ),
    mutant(
        "loss of the last microbatch alone",
        "torch_impl.explicit.pipeline_parallel",
        "share.add_(out)",
        "share.copy_(out)",
        {LOSS},
    ),
    mutant(
        "gradients that are not sent",
        "torch_impl.explicit.pipeline_parallel",
        '            with observe("send", action):\n                sends.append(',
        '            if action.kind == "forward":\n                sends.append(',
        {STUCK},
    ),
    mutant(
        "weight gradient of another microbatch",
        "torch_impl.explicit.pipeline_parallel",
        "            passes.backward_weight(saved[chunk, i])\n",
        "            mine, other = saved[chunk, i].put_off, saved.get((chunk, i + 1), saved[chunk, i]).put_off\n"
        "            saved[chunk, i].put_off = [(a, c, b) for (a, _, b), (_, c, _) in zip(mine, other or mine)]\n"
        "            passes.backward_weight(saved[chunk, i])\n",
        BACKWARD,
        schedule="zb_h1",
    ),
    mutant(
        "no weight gradient of the last microbatch",
        "torch_impl.explicit.pipeline_parallel",
        "            passes.backward_weight(saved[chunk, i])\n",
        "            if i + 1 < schedule.microbatches:\n                passes.backward_weight(saved[chunk, i])\n",
        BACKWARD,
        schedule="zb_v",
    ),
    mutant(
        "chunks of a stage swapped",
        "torch_impl.explicit.pipeline_parallel",
        "*functions, final = chunks[chunk]",
        "*functions, final = chunks[-1 - chunk]",
        ALL,
        schedule="interleaved",
    ),
)
