"""Mistakes in collectives."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

COLLECTIVES = (
    *plant(
        "collectives",
        "torch_impl.collectives",
        "proof/test_collectives",
        (
            "broadcast from rank 0 whatever the root",
            "dist.broadcast(flat, group_src=root, group=group)",
            "dist.broadcast(flat, group_src=0, group=group)",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "scatter in the opposite order of the ranks",
            "[block.contiguous() for block in x.chunk(group.size())]",
            "[block.contiguous() for block in x.chunk(group.size())][::-1]",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "every rank keeps what reduce left in its buffer",
            "if group.rank() != root:",
            "if False:",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "all_to_all that keeps its blocks",
            "dist.all_to_all_single(out, x, group=group)",
            "out.copy_(x)",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "backward all_reduce in the caller's gradient",
            "all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None",
            "all_reduce(grads[0], ctx.group), None",
            "test_torch_backward_transposes_forward",
        ),
    ),
    *plant(
        "collectives",
        "jax_impl.collectives",
        "proof/test_collectives",
        (
            "broadcast from rank 0 whatever the root, in JAX",
            "return lax.psum(jnp.where(lax.axis_index(axis) == root,",
            "return lax.psum(jnp.where(lax.axis_index(axis) == 0,",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "everyone gets the sum that only the root should",
            "return jnp.where(lax.axis_index(axis) == root, total, jnp.zeros_like(total))",
            "return total",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "gather along dim 0 whatever the dim",
            "axis=dim, tiled=True",
            "axis=0, tiled=True",
            "test_jax_collective_is_what_numpy_defines",
        ),
        (
            "permute against the direction of its edges",
            "lax.ppermute(x, axis, edges)",
            "lax.ppermute(x, axis, [(target, source) for source, target in edges])",
            "test_jax_permute_moves_along_the_edges_and_gives_zeros_elsewhere",
        ),
    ),
)
