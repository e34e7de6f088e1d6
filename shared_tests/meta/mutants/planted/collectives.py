"""Mistakes in collectives and in schedules of pipelines."""

from __future__ import annotations

from shared_tests.meta.mutants.planted.plant import plant

COLLECTIVES = (
    *plant(
        "collectives",
        "torch_impl.collectives",
        "proof/test_collectives",
        (
            "broadcast from rank 0 whatever the root",
            "dist.broadcast(x, group_src=root, group=group)",
            "dist.broadcast(x, group_src=0, group=group)",
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
            "return x if group.rank() == root else None",
            "return x",
            "test_torch_collective_is_what_numpy_defines",
        ),
        (
            "all_to_all that keeps its blocks",
            "dist.all_to_all_single(out, x.contiguous(), group=group)",
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

SCHEDULES = (
    *plant(
        "schedules",
        "contract.schedule",
        "proof/test_schedule",
        (
            "backward passes start at the first stage",
            "down[::-1]",
            "down",
            "test_gpipe_is_complete_and_in_a_possible_order",
            "ValueError: tick",
        ),
        (
            "one tick too many",
            "ticks = range(microbatches + stages - 1)",
            "ticks = range(microbatches + stages)",
            "test_gpipe_is_complete_and_in_a_possible_order",
        ),
        (
            "microbatches in the opposite order",
            "passes = [(stage, tick - start)",
            "passes = [(stage, microbatches - 1 - (tick - start))",
            "test_every_stage_runs_all_forward_passes_and_then_all_backward_passes_in_order",
        ),
        (
            "a pass may run in the tick of what it needs",
            "done.get(need, tick) >= tick",
            "done.get(need, tick + 1) > tick",
            "test_a_wrong_schedule_is_found",
        ),
        (
            "backward without waiting for the stage after",
            'return [action._replace(kind="forward"), *later]',
            'return [action._replace(kind="forward")]',
            "test_a_wrong_schedule_is_found",
        ),
        (
            "bubble theory with m + p ticks",
            "Fraction(stages - 1, microbatches + stages - 1)",
            "Fraction(stages - 1, microbatches + stages)",
            "test_gpipe_is_complete_and_in_a_possible_order",
        ),
    ),
    *plant(
        "schedules",
        "contract.strategies.pipeline_parallel",
        "proof/test_cost",
        (
            "the smallest microbatch of a tick counts",
            "most = max(rows[tick - s] for s in sending)",
            "most = min(rows[tick - s] for s in sending)",
            "test_an_uneven_microbatch_counts_with_the_largest_of_its_tick",
        ),
        (
            "the scanned pipeline stops before its last tick",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 1",
            "tuple((s, s + 1) for s in range(n - 1)), m + n - 2",
            "test_annotated_pipeline_permutes_in_every_tick",
        ),
    ),
    *plant(
        "schedules",
        "benchmarks.bubbles.timeline",
        "bench/test_bench_bubbles",
        (
            "replay that does not wait for the neighbour",
            "start = max(free[stage], done.get((action.kind, action.microbatch, before), 0))",
            "start = free[stage]",
            "test_stages_that_are_alike_have_the_closed_form_s_bubble_however_long_a_backward_pass_takes",
        ),
    ),
)
