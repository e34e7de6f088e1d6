"""How many bytes the HLO reader counts for each kind of collective, of every type and form."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shardiff.record import Part
from shared_tests.tool.hlo_modules import ADD, ALL, brief, module, only, reduce


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        ("pred[9]", "bool", 9),
        ("s4[9]{0:E(4)}", "int4", 5),
        ("u4[8]", "uint4", 4),
        ("s2[9]", "int2", 3),
        ("u1[9]", "uint1", 2),
        ("f4e2m1fn[7]", "float4_e2m1fn", 4),
        ("f8e4m3fn[3]", "float8_e4m3fn", 3),
        ("f8e5m2[3]", "float8_e5m2", 3),
        ("f8e4m3b11fnuz[3]", "float8_e4m3b11fnuz", 3),
        ("f8e8m0fnu[3]", "float8_e8m0fnu", 3),
        ("s8[3]", "int8", 3),
        ("u16[3]", "uint16", 6),
        ("f16[3]", "float16", 6),
        ("bf16[3,5]{1,0:T(8,128)(2,1)S(1)}", "bfloat16", 30),
        ("s32[]", "int32", 4),
        ("f64[2,3]", "float64", 48),
        ("c64[3]", "complex64", 24),
        ("c128[3]", "complex128", 48),
        ("f32[0,4]", "float32", 0),
    ],
)
def test_bytes_are_the_logical_ones_of_every_type_and_layout(shape: str, dtype: str, num_bytes: int) -> None:
    text = f"%x = {shape} parameter(1)\nROOT %r = {shape} collective-permute(%x), source_target_pairs={{{{0,1}}}}"
    record = only(module(text))
    assert (record.dtype, record.payload_bytes, record.wire_bytes) == (dtype, num_bytes, num_bytes)


PERMUTE = "channel_id=1, source_target_pairs={{0,1}}"


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        (f"f32[64] all-gather(%p), {ALL}, dimensions={{0}}", ("all_gather", 256, 8)),
        (f"f32[1] reduce-scatter(%p), {ALL}, dimensions={{0}}, to_apply=%add", ("reduce_scatter", 32, 8)),
        (f"(f32[1], f32[2]) reduce-scatter(%p, %q), {ALL}, dimensions={{0}}, to_apply=%add", ("reduce_scatter", 96, 8)),
        (f"(f32[8], f32[16]) all-reduce(%p, %q), {ALL}, to_apply=%add", ("all_reduce", 96, 8)),
        (f"(f32[64], f32[128]) all-gather(%p, %q), {ALL}, dimensions={{0}}", ("all_gather", 768, 8)),
        ("f32[8] all-to-all(%p), channel_id=1, replica_groups={}, dimensions={0}", ("all_to_all", 32, 8)),
        ("(f32[8], f32[8]) all-to-all(%p, %p), channel_id=1, replica_groups={{0,1}}", ("all_to_all", 64, 2)),
        ("f32[8] collective-broadcast(%p), channel_id=1, replica_groups={{0,1,2,3}}", ("broadcast", 32, 4)),
        (f"f32[8] collective-permute(%p), {PERMUTE}", ("collective_permute", 32, None)),
        (f"(f32[8], f32[16]) collective-permute(%p, %q), {PERMUTE}", ("collective_permute", 96, None)),
        (f"(f32[8], f32[64]) all-gather-start(%p), {ALL}, dimensions={{0}}", ("all_gather", 256, 8)),
        (
            f"((f32[8], f32[16]), (f32[64], f32[128])) all-gather-start(%p, %q), {ALL}, dimensions={{0}}",
            ("all_gather", 768, 8),
        ),
        (f"f32[8] all-reduce-start(%p), {ALL}, to_apply=%add", ("all_reduce", 32, 8)),
        (f"(f32[8], f32[16]) all-reduce-start(%p, %q), {ALL}, to_apply=%add", ("all_reduce", 96, 8)),
        (
            f"((f32[8]), f32[1]) reduce-scatter-start(%p), {ALL}, dimensions={{0}}, to_apply=%add",
            ("reduce_scatter", 32, 8),
        ),
        (
            "((f32[8]), f32[8]) all-to-all-start(%p), channel_id=1, replica_groups={}, dimensions={0}",
            ("all_to_all", 32, 8),
        ),
        (f"(f32[8], f32[8], u32[], u32[]) collective-permute-start(%p), {PERMUTE}", ("collective_permute", 32, None)),
        (
            f"((f32[8], f32[16]), (f32[8], f32[16])) collective-permute-start(%p, %q), {PERMUTE}",
            ("collective_permute", 96, None),
        ),
    ],
)
def test_payload_of_every_form_sync_started_and_combined(instruction: str, expected: tuple) -> None:
    record = only(module(f"%q = f32[16] parameter(1)\nROOT %r = {instruction}"))
    assert brief(record)[:3] == expected
    assert record.is_async == ("-start(" in instruction)


def test_operands_of_a_combined_collective_are_its_parts() -> None:
    text = f"%q = f32[16] parameter(1)\nROOT %r = (f32[8], f32[16]) all-reduce(%p, %q), {ALL}, to_apply=%add"
    assert only(module(text)).parts == (Part("float32", 32, (8,)), Part("float32", 64, (16,)))
    assert only(module(reduce(ALL))).parts == ()
    text = "ROOT %r = (f32[8], f32[8]) all-to-all(%p, %p), channel_id=1, replica_groups={{0,1}}"
    assert only(module(text)).parts == ()  # they are the blocks of one array


def test_a_permute_in_place_moves_the_slices_that_it_names() -> None:
    text = f"ROOT %r = f32[8] collective-permute(%p, %p, %p, %p), {PERMUTE}, slice_sizes={{{{4}},{{3}}}}"
    (record,) = read(module(text)).records
    assert (record.payload_bytes, [part.bytes for part in record.parts]) == (28, [16, 12])
    (record,) = read(module(text.replace("f32[8] collective", "token[] collective"))).records
    assert record.payload_bytes == 0


def test_a_ragged_all_to_all_of_what_is_not_known_is_bounded_by_what_comes_out() -> None:
    for operand in ("%gone", "%t"):
        text = f"""%t = (f32[8], f32[8]) tuple(%p, %p)
        ROOT %r = f32[32] ragged-all-to-all({operand}, %p, %p), channel_id=1, replica_groups={{{{0,1}}}}"""
        assert [brief(record)[:3] for record in read(module(text)).records] == [("all_to_all", 128, 2)]


def test_a_tuple_of_mixed_types_is_one_record_that_names_both() -> None:
    record = only(module("%q = bf16[6] parameter(1)\n" + reduce(ALL, "(f32[8], bf16[6])", "%p, %q")))
    assert (record.dtype, record.payload_bytes) == ("float32+bfloat16", 44)


def test_dynamic_dims_count_with_their_bound_and_are_flagged() -> None:
    record = only(module("%q = f32[<=6,4] parameter(1)\n" + reduce(ALL, "f32[<=6,4]", "%q")))
    assert (record.payload_bytes, record.flags) == (96, ("dynamic",))


def test_a_ragged_all_to_all_is_bounded_by_what_goes_in() -> None:
    text = """%out = f32[32] parameter(1)
    %o = s64[4] parameter(2)
    ROOT %r = f32[32] ragged-all-to-all(%p, %out, %o, %o, %o, %o), channel_id=1, replica_groups={{0,1,2,3}}"""
    record = only(module(text))
    assert (brief(record)[:3], record.flags) == (("all_to_all", 32, 4), ("ragged",))


def test_a_promoted_reduction_is_flagged() -> None:
    promoted = ADD.replace("%add ", "%add.clone_promoted ")
    record = only(module(reduce(ALL).replace("%add", "%add.clone_promoted"), promoted))
    assert record.flags == ("promoted",)
