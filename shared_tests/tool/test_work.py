"""What programs do besides communicating, and reports of it where two of them take different times."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from msgspec import convert

from benchmarks.documents.steps import Steps
from benchmarks.steps.why import reasons
from shardiff.hlo import HloError
from shardiff.hlo.work import Work, work
from shared_tests.bench.report_documents import stepped

LOOP = """HloModule step, num_partitions=2

turned {
  p = f32[8,4]{1,0} parameter(0)
  ROOT t = f32[4,8]{0,1} transpose(p), dimensions={1,0}
}

body {
  state = (s32[], f32[8,4]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[8,4]{1,0} get-tuple-element(state), index=1
  one = s32[] constant(1)
  next = s32[] add(i, one)
  left = f32[4,8]{0,1} fusion(x), kind=kLoop, calls=turned
  square = f32[4,4]{1,0} dot(left, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  y = f32[8,4]{1,0} dot(x, square), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT both = (s32[], f32[8,4]{1,0}) tuple(next, y)
}

condition {
  state = (s32[], f32[8,4]{1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  most = s32[] constant(3)
  ROOT less = pred[] compare(i, most), direction=LT
}

unused {
  p = f32[8,4]{1,0} parameter(0)
  ROOT never = f32[8,4]{1,0} copy(p)
}

ENTRY main {
  x = f32[8,4]{1,0} parameter(0)
  zero = s32[] constant(0)
  start = (s32[], f32[8,4]{1,0}) tuple(zero, x)
  loop = (s32[], f32[8,4]{1,0}) while(start), condition=condition, body=body
  last = f32[8,4]{1,0} get-tuple-element(loop), index=1
  ROOT out = f32[8,4]{0,1} copy(last)
}
"""


def test_work_counts_what_runs_as_often_as_it_runs():
    assert work(LOOP) == Work(
        products=6,
        flops=3 * (2 * 4 * 4 * 8 + 2 * 8 * 4 * 4),  # [4, 8] @ [8, 4] and [8, 4] @ [4, 4]
        transposes=3,
        transposed_bytes=3 * 4 * 8 * 4,
        copies=1,
        copied_bytes=8 * 4 * 4,
    )


def test_products_sum_over_several_dims_and_batch_dims_count_once():
    text = """HloModule m
ENTRY main {
  a = bf16[5,2,3,4]{3,2,1,0} parameter(0)
  b = bf16[5,3,4,7]{3,2,1,0} parameter(1)
  ROOT c = bf16[5,2,7]{2,1,0} dot(a, b), lhs_batch_dims={0}, rhs_batch_dims={0},
    lhs_contracting_dims={2,3}, rhs_contracting_dims={1,2}
}
"""
    assert work(text) == Work(products=1, flops=2 * 5 * 2 * 7 * 3 * 4)


def test_moves_add_up_and_what_may_never_run_is_not_counted():
    text = """HloModule m
again {
  p = f32[8] parameter(0)
  c = f32[8] copy(p)
  t = f32[8] transpose(c), dimensions={0}
}
ENTRY main {
  a = f32[8] parameter(0)
  b = f32[4] parameter(1)
  c1 = f32[8] copy(a)
  c2 = f32[4] copy(b)
  t1 = f32[8] transpose(a), dimensions={0}
  t2 = f32[4] transpose(b), dimensions={0}
  ROOT w = f32[8] while(a), condition=again, body=again
}
"""
    assert work(text) == Work(transposes=2, transposed_bytes=48, copies=2, copied_bytes=48)


@pytest.mark.parametrize(
    ("rest", "flops"),
    [("dot(a, a)", 2 * 64), ("dot(gone, a), lhs_contracting_dims={0}", 2 * 64)]
    + [
        (f"dot(a, a), lhs_contracting_dims={{{dims}}}", 2 * 64 * size)
        for dims, size in (("0", 8), ("1", 1), ("0,2", 8))
    ],
)
def test_a_product_that_is_not_all_there_counts_as_far_as_it_is(rest, flops):
    text = f"HloModule m\nENTRY main {{\n  a = f32[8] parameter(0)\n  ROOT d = f32[8,8] {rest}\n}}\n"
    assert work(text) == Work(products=1, flops=flops)


def test_what_is_no_program_has_no_work():
    with pytest.raises(HloError):
        work("module @jit_f {}")


def test_the_work_of_a_compiled_step_is_that_of_its_matrix_products():
    import jax
    import jax.numpy as jnp

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x @ w))

    like = [jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)]
    text = jax.jit(jax.grad(loss)).lower(*like).compile().as_text()
    assert text is not None
    done = work(text)
    assert (done.products, done.flops) == (2, 2 * 2 * 32 * 64 * 64)


def row(implementation: str, compute: float, temporaries: int, wire_bytes: int = 1000, **done: int) -> dict[str, Any]:
    return {
        "strategy": "data_parallel",
        "ranks": 2,
        "implementation": implementation,
        "compute_seconds": {"median": compute},
        "exposed_seconds": {"median": 0.02},
        "wire_bytes_compiled": wire_bytes,
        "memory": {"measured": {"temporaries": temporaries}},
        "work": asdict(Work(products=11, flops=10**9)) | done,
    }


def document(ratio: float, *rows: dict[str, Any]) -> Steps:
    """A whole result in which these fields of these rows count."""
    whole = stepped()
    pattern, pair = whole["rows"][0], whole["ratios"][0]

    def spread(of: dict[str, float]) -> dict[str, float]:
        return {"median": of["median"], "q1": of["median"], "q3": of["median"]}

    made = [
        {
            **pattern,
            **row,
            "framework": "jax",
            "compute_seconds": spread(row["compute_seconds"]),
            "exposed_seconds": spread(row["exposed_seconds"]),
            "memory": {"measured": {**pattern["memory"]["measured"], **row["memory"]["measured"]}, "closed_form": None},
        }
        for row in rows
    ]
    named = {"strategy": "data_parallel", "ranks": 2, "of": "shard_map", "to": "annotated"}
    whole |= {"rows": made, "ratios": [{**pair, **named, "ratio": spread({"median": ratio})}]}
    return convert(whole, Steps)


def test_the_reason_names_where_the_time_goes_and_only_what_differs():
    ours = row("shard_map", 0.024, 100)
    theirs = row("annotated", 0.064, 101, transposes=8, transposed_bytes=32_000_000)
    assert reasons(document(0.51, ours, theirs)) == [
        "data_parallel on 2 ranks, shard_map over annotated 0.51: compute 24.0 ms over 64.0 ms; exposed communication "
        "20.0 ms over 20.0 ms; transposes 0 B in 0 over 32 MB in 8"
    ]
    more = row("annotated", 0.064, 200, 1500)
    (reason,) = reasons(document(0.51, ours, more))
    assert reason.endswith("must send 1 kB over 1.5 kB; needs 100 B over 200 B for what lives within a step")


@pytest.mark.parametrize("ratio", [0.96, 1.0, 1.05])
def test_what_is_alike_needs_no_reason(ratio: float):
    assert reasons(document(ratio, row("shard_map", 0.02, 1), row("annotated", 0.03, 2))) == []


def test_a_result_from_before_there_was_work_says_where_the_time_goes():
    rows = [{**row(name, 0.02, 1), "work": None} for name in ("shard_map", "annotated")]
    (reason,) = reasons(document(1.3, *rows))
    assert reason.endswith("compute 20.0 ms over 20.0 ms; exposed communication 20.0 ms over 20.0 ms")
