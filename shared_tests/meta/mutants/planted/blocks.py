"""Mistakes in the transformer's reference, in what is refused, in closed forms of blocks, and in rounding."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

BLOCKS = (
    *plant(
        "training",
        "contract.blocks",
        "proof/test_blocks",
        (
            "the reference's epsilon outside of the root",
            "scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON)",
            "scale = 1 / (np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + EPSILON)",
            "test_the_reference_is_what_torch_s_own_modules_compute",
        ),
        (
            "the reference's scores divided by the root of the width",
            "1 / math.sqrt(q.shape[-1])",
            "1 / math.sqrt(x.shape[-1])",
            "test_the_reference_is_what_flax_s_own_modules_compute",
        ),
        (
            "the reference's softmax without its sum in the backward pass",
            "return p * (dp - (dp * p).sum(axis=-1, keepdims=True))",
            "return p * dp",
            "test_every_gradient_of_a_block_is_the_central_difference",
        ),
        (
            "the reference's norm backward as if the scale were constant",
            "dx = scale * (dunit - unit * np.mean(dunit * unit, axis=-1, keepdims=True))",
            "dx = scale * dunit",
            "test_every_gradient_of_a_block_is_the_central_difference",
        ),
        (
            "the gates' sum forgotten in the router's gradient",
            "dtop = (dgates - (dgates * gates).sum(axis=-1, keepdims=True)) / total",
            "dtop = dgates / total",
            "test_every_gradient_of_a_block_is_the_central_difference",
        ),
        (
            "the reference lets a token see later ones",
            "np.tril(np.ones((size, size), bool))",
            "np.tril(np.ones((size, size), bool), 1)",
            "test_a_token_does_not_see_later_ones",
        ),
        (
            "the reference serves a token's second choice before the next token",
            "queue = chosen.swapaxes(1, 2).reshape(len(chosen), -1, problem.experts)",
            "queue = chosen.swapaxes(1, 2)[:, ::-1].reshape(len(chosen), -1, problem.experts)",
            "test_a_full_expert_drops_second_choices_before_first_and_later_tokens_before_earlier",
        ),
        (
            "gates shared out among the choices that were served",
            "total = top.sum(axis=-1, keepdims=True)",
            "total = (top * slots.sum(axis=(-1, -2))).sum(axis=-1, keepdims=True)",
            "test_a_dropped_choice_adds_nothing_and_keeps_its_share_of_the_gates",
        ),
    ),
    *plant(
        "training",
        "contract.transformer",
        "proof/test_blocks",
        (
            "a capacity of the whole batch",
            "factor * self.top_k * self.sequence / self.experts",
            "factor * self.top_k * self.sequence * self.batch / self.experts",
            "test_the_capacity_is_that_of_one_sequence_so_samples_do_not_compete",
        ),
        (
            "down scaled as up",
            "values / np.sqrt(shape[-2])",
            "values / np.sqrt(self.width)",
            "test_sizes_of_a_block_are_free_and_every_matrix_has_its_own_scale",
        ),
    ),
    *plant(
        "training",
        "contract.share",
        "proof/test_validation",
        (
            "only the shortest parameter must divide",
            "height = min((height for height in asked.heights if height % n), default=None)",
            "height = min(asked.heights) if min(asked.heights) % n else None",
            "test_every_side_refuses_the_same_transformers_in_the_same_line",
            "Failed: DID NOT RAISE",
        ),
    ),
    *plant(
        "training",
        "torch_impl.online_softmax",
        "proof/test_attention",
        (
            "the largest score not taken off before exp",
            "most = p.amax(-1, keepdim=True)",
            "most = p.amax(-1, keepdim=True) * 0",
            "test_in_bfloat16_many_parts_are_at_most_twice_as_far_off_as_one_device",
        ),
        (
            "parts put together in bfloat16",
            "return x.float() if x.dtype == torch.bfloat16 else x",
            "return x",
            "test_in_bfloat16_many_parts_are_at_most_twice_as_far_off_as_one_device",
        ),
    ),
    *plant(
        "training",
        "torch_impl.online_softmax",
        "proof/test_online_softmax",
        (
            "scores not divided by the root of the head's size",
            "(q @ k.mT).mul_(q.shape[-1] ** -0.5)",
            "q @ k.mT",
            "test_products_and_the_fused_kernel_agree",
        ),
        (
            "gradients of queries and keys not divided by it",
            ".mul_(p).mul_(q.shape[-1] ** -0.5)",
            ".mul_(p)",
            "test_products_and_the_fused_kernel_agree",
        ),
    ),
    *plant(
        "training",
        "torch_impl.explicit.data_parallel",
        "proof/test_transformer",
        (
            "a mean of the ranks' means",
            "return Batch(batch.x[mine], batch.y[mine], batch.weight[mine])",
            "weight = batch.weight[mine] / batch.weight[mine].sum() * batch.weight.sum() / 2\n"
            "    return Batch(batch.x[mine], batch.y[mine], weight)",
            "test_the_loss_is_the_mean_over_the_tokens_that_count_however_they_are_spread",
        ),
    ),
    *plant(
        "training",
        "contract.strategies.sequence_parallel",
        "proof/test_transformer",
        (
            "a gain's gradient not counted",
            'name.startswith(("gain", "router"))',
            'name.startswith("router")',
            "test_torch_sends_what_the_closed_form_says_record_by_record",
        ),
    ),
    *plant(
        "training",
        "contract.strategies.ring_attention",
        "proof/test_transformer",
        (
            "dk and dv sent once too few",
            '("gradient of k and v", there, n)',
            '("gradient of k and v", there, n - 1)',
            "test_torch_sends_what_the_closed_form_says_record_by_record",
        ),
    ),
    *plant(
        "collectives",
        "torch_impl.collectives",
        "proof/test_collectives",
        (
            "an all_reduce of the memory of a tensor with gaps",
            "    flat = x.contiguous()\n    dist.all_reduce",
            "    flat = x\n    dist.all_reduce",
            "test_torch_collective_is_what_numpy_defines",
        ),
    ),
    *plant(
        "training",
        "torch_impl.explicit.ulysses",
        "proof/test_interface",
        (
            "places in another order than on the other sides",
            "def split_batch(batch",
            "def total_first():\n    pass\n\n\ntotal = total_first\n\n\ndef split_batch(batch",
            "test_a_strategy_has_its_names_in_order",
        ),
    ),
)
