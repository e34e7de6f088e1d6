"""What holds for the diff of any two programs, and for the choice of records whose bytes add up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from shardiff.diff.alignment import cumulative, subset_with_sum
from shardiff.diff.rows import align, extra_bytes, unexplained
from shardiff.record import OPS, PHASES, Executions, Record, step_bytes
from shared_tests.tool.diff_records import OTHER, THIS, only_row, rec

MANY = Executions(10**15, 10**15)  # as a file may say; nothing may loop that many times
records = st.builds(
    rec,
    st.sampled_from(OPS),
    st.sampled_from([0, 4, 8, 12, 64, 100]),
    st.sampled_from(PHASES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["float32", "bfloat16", "int32"]),
    executions=st.sampled_from([Executions(1, 1), Executions(3, 3), Executions(0, 1), Executions(1, None), MANY]),
    parts=st.sampled_from([(), (), (4, 4), (64, 36), (3, 5)]),
    computation=st.sampled_from([None, "body"]),
    detail=st.sampled_from([None, "jvp()/dot_general", "rematted_computation/psum"]),
    moves=st.sampled_from([None, None, "parameter", "gradient", "activation"]),
    groups=st.sampled_from([None, THIS, OTHER]),
    edges=st.sampled_from([None, ((0, 1), (1, 2)), ((1, 0),)]),
)


def consistent(one: Record) -> Record:
    """The parts of a record add up to it. Wire bytes are free, as for a permute from a rank to itself."""
    return replace(one, payload_bytes=sum(part.bytes for part in one.parts)) if one.parts else one


programs = st.lists(records.map(consistent), max_size=8)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(programs, programs)
def test_rows_add_up_to_the_totals_of_both_sides(left, right):
    """Every execution of every operand is in just one row: bytes, payload and calls of operands are the programs'."""
    rows = align(left, right)
    for side, program in (("left", left), ("right", right)):
        pieces = [piece for row in rows for piece in getattr(row, side)]
        assert sum(row.bytes[side] for row in rows) == step_bytes(program)
        assert sum(p.payload_bytes * p.times for p in pieces) == sum(r.payload_bytes * r.times for r in program)
        operands = [sum(r.times * max(len(r.parts), 1) for r in some) for some in (pieces, program)]
        assert operands[0] == operands[1]
        assert not any(getattr(row, side) for row in rows if row.verdict.startswith("only") and side not in row.verdict)
    assert extra_bytes(rows) == step_bytes(right) - step_bytes(left)


def halved(r: Record) -> Record:
    return rec(r.op, r.payload_bytes // 2, r.phase, dtype="bfloat16")


# Rewrites of one record, and the rules that must tell of each.
REWRITES = {
    (): ("all_reduce", lambda r: [r]),
    ("dtype",): ("all_gather", lambda r: [halved(r)]),
    ("moved",): ("all_reduce", lambda r: [replace(r, phase="update")]),
    ("dtype", "moved"): ("all_to_all", lambda r: [replace(halved(r), phase="update")]),
    ("unfused_reduce_scatter",): ("reduce_scatter", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("fused_reduce_scatter",): ("all_reduce", lambda r: [rec("reduce_scatter", r.payload_bytes, r.phase)]),
    ("unfused_reduce_scatter", "dtype"): (
        "reduce_scatter",
        lambda r: [halved(rec("all_reduce", r.payload_bytes, r.phase))],
    ),
    ("decomposed_all_reduce",): (
        "all_reduce",
        lambda r: [rec(op, r.payload_bytes, r.phase) for op in ("reduce_scatter", "all_gather")],
    ),
    ("gather_by_sum",): ("all_gather", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("broadcast_by_sum",): ("broadcast", lambda r: [rec("all_reduce", r.payload_bytes, r.phase)]),
    ("broadcasts_as_gather",): ("broadcast", lambda r: [rec("all_gather", r.payload_bytes, r.phase)]),
    ("split",): ("all_to_all", lambda r: [rec(r.op, r.payload_bytes * part // 4, r.phase) for part in (1, 3)]),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(REWRITES)), st.sampled_from(["forward", "backward"])), max_size=9),
    st.data(),
)
def test_a_program_rewritten_record_by_record_is_told_by_just_those_rules(rewrites, data):
    """The sizes are powers of five, so that no sum of some is another; what is derived comes in any order."""
    written = [rec(REWRITES[rules][0], 64 * 5**i, phase, detail=str(i)) for i, (rules, phase) in enumerate(rewrites)]
    pieces = [
        [replace(r, name=str(i)) for r in REWRITES[rules][1](written[i])] for i, (rules, _) in enumerate(rewrites)
    ]
    derived = [r for piece in data.draw(st.permutations(pieces)) for r in piece]
    rows = align(written, derived)
    assert [row.left for row in rows] == [(one,) for one in written]
    for i, (row, (rules, _)) in enumerate(zip(rows, rewrites, strict=True)):
        assert row.rules == rules
        assert row.verdict == ("rewritten" if rules else "same")
        assert list(row.right) == pieces[i]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.sampled_from(["all_gather", "all_reduce"]), st.data())
def test_what_is_combined_by_operands_or_in_sum_is_told_as_combined(sizes, op, data):
    written = [rec(op, 4 * size) for size in sizes]
    parts = tuple(data.draw(st.permutations([4 * size for size in sizes])))
    for whole in (rec(op, sum(parts)), rec(op, sum(parts), parts=parts)):
        row = only_row(written, [whole])
        assert (row.rules, row.left, row.right) == (("combined",), tuple(written), (whole,))
        row = only_row([whole], written)
        assert (row.rules, row.left, row.right) == (("split",), (whole,), tuple(written))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs, st.randoms(use_true_random=False))
def test_a_program_is_the_same_as_itself_in_any_order(program, random):
    shuffled = [replace(r, name=str(i)) for i, r in enumerate(program)]
    random.shuffle(shuffled)
    assert {row.verdict for row in align(program, shuffled)} <= {"same"}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 50) | st.just(2**61), max_size=40), st.data())
def test_a_subset_has_the_sum_that_it_was_chosen_for(sizes, data):
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    target = sum(sizes[i] for i in chosen)
    found = subset_with_sum(cumulative(sizes), target)
    assert len(set(found)) == len(found)
    assert sum(sizes[i] for i in found) == target or (len(sizes) > 24 and found == [])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.data())
def test_a_run_of_neighbours_is_found_among_however_many(sizes, data):
    start = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(start + 1, len(sizes)))
    found = subset_with_sum(cumulative(sizes), sum(sizes[start:end]))
    assert sum(sizes[i] for i in found) == sum(sizes[start:end]) and found == list(range(found[0], found[-1] + 1))


def test_any_subset_is_found_among_few():
    for count, found in ((24, [0, 2]), (25, [])):
        sizes = [1000, 1, 2000] + [10] * (count - 3)
        assert subset_with_sum(cumulative(sizes), 3000) == found
    assert subset_with_sum(cumulative([1000, 1, 2000, 10]), 3000, most=3) == []


def test_thousands_of_records_are_aligned_in_seconds():
    """This holds also where no record has a counterpart: 3,000 on each side once took 10 s of the CPU."""
    from time import process_time

    program = [rec("all_reduce", 4 * i, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    start = process_time()
    assert unexplained(align(program, program[::-1])) == 0
    other = [rec("all_reduce", 4 * i + 1, phase) for i in range(1, 1500) for phase in ("forward", "backward")]
    assert unexplained(align(program, other)) > 5000
    assert process_time() - start < 10


def test_nothing_is_looped_over_as_often_as_a_file_says_that_it_runs():
    often = [rec(op, 4096, phase, 2, executions=MANY, groups=THIS) for op in OPS for phase in ("forward", "backward")]
    once = [rec(op, 2048, "backward", 2, groups=groups) for op in OPS for groups in (THIS, OTHER)]
    for left, right in ((often, once), (once, often), (often[:4], once[:4])):
        assert unexplained(align(left, right)) > 0
