"""What the HLO reader says of each kind of collective: which devices, how many bytes, in which phase, from where.

hlo_cases/ holds texts with their answers. XLA's own parser (private, so only in tests) accepts every text of ours.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardiff.hlo import HloError, read, read_file
from shardiff.record import Part
from shared_tests.tool.hlo_modules import ADD, ALL, CHOSEN, FLAT, brief, module, only, reduce, valid

CASES = Path(__file__).parent / "hlo_cases"
GOOD = sorted(path for path in CASES.rglob("*.hlo.txt") if not path.name.startswith("bad_"))
REAL = sorted((CASES / "real").glob("*.hlo.txt"))


# The cases.


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name.removesuffix(".hlo.txt"))
def test_every_case_has_the_records_that_its_answer_lists(path: Path) -> None:
    expected = json.loads(path.with_name(path.name.replace(".hlo.txt", ".json")).read_text())["collectives"]
    found = [json.loads(json.dumps(record.to_json())) for record in read_file(path).records]
    for answer in expected:
        matching = [r for r in found if all(r[key] == value for key, value in answer.items())]
        assert matching, f"no record like {answer} among {found}"
        found.remove(matching[0])
    assert not found, "records that the answer does not list"


@pytest.mark.parametrize("path", sorted(CASES.glob("bad_*")), ids=lambda path: path.name)
def test_every_bad_case_is_refused_in_one_line_that_names_the_file(path: Path) -> None:
    with pytest.raises(HloError) as problem:
        read_file(path)
    assert str(problem.value).startswith(str(path)) and "\n" not in str(problem.value)


# Which devices.


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{ {0, 1}, {2,3} }", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{}}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=4] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'b','a'}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2,3,7,6,5,4) {'b'}", [[0, 1, 2, 3], [7, 6, 5, 4]]),
    ],
)
def test_every_syntax_of_replica_groups_is_understood(value: str, expected: list) -> None:
    record = only(module(reduce(FLAT + f"replica_groups={value}")))
    assert record.groups is not None and sorted(map(list, record.groups)) == sorted(expected)
    assert record.group_size == len(expected[0])


REPLICAS, PARTITIONS = [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("all-reduce(%p), replica_groups={{0,1}}, to_apply=%add", REPLICAS),
        ("all-reduce(%p), replica_groups={}, to_apply=%add", REPLICAS),
        ("all-reduce(%p), channel_id=1, replica_groups={{0},{1}}, to_apply=%add", PARTITIONS),
        ("all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add", [list(range(8))]),
        ("all-reduce(%p), channel_id=1, replica_groups={}, to_apply=%add", [list(range(8))]),
        (
            f"all-reduce(%p), {FLAT}replica_groups={{{{0,1,6,7}},{{2,3,4,5}}}}, to_apply=%add",
            [[0, 1, 6, 7], [2, 3, 4, 5]],
        ),
        ("all-to-all(%p), replica_groups={{0,1}}, dimensions={0}", REPLICAS),
        ("all-to-all(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}", PARTITIONS),
        (
            "all-to-all(%p), channel_id=1, replica_groups={{0,2},{1,3}}, dimensions={0}",
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ("collective-broadcast(%p), replica_groups={{1,0}}", [[4, 0], [5, 1], [6, 2], [7, 3]]),
    ],
)
def test_channel_and_global_ids_decide_whether_an_id_is_a_replica_a_partition_or_both(
    instruction: str, expected: list
) -> None:
    record = only(module(f"ROOT %r = f32[8] {instruction}", header="replica_count=2, num_partitions=4"))
    assert record.groups is not None and sorted(map(list, record.groups)) == sorted(expected)
    assert record.group_size == len(expected[0])


@pytest.mark.parametrize(
    ("channel", "edges"),
    [("", {(0, 4), (1, 5), (2, 6), (3, 7)}), ("channel_id=1, ", {(0, 1), (4, 5)})],
)
def test_edges_of_a_permute_are_replicas_without_a_channel_and_partitions_with_one(channel: str, edges: set) -> None:
    text = f"ROOT %r = f32[8] collective-permute(%p), {channel}source_target_pairs={{{{0,1}}}}"
    record = only(module(text, header="replica_count=2, num_partitions=4"))
    assert record.edges is not None and set(record.edges) == edges


def test_ids_beyond_the_declared_devices_are_taken_as_they_stand_and_counted() -> None:
    module_ = valid(module(reduce("replica_groups={{0,1},{2,3}}"), header="is_scheduled=true"))
    assert module_.num_devices == 4 and module_.records[0].groups == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("header", "collective", "count"),
    [
        ("is_scheduled=true", "all-reduce(%p), replica_groups={}, to_apply=%add", 1),
        ("num_partitions=4", "all-reduce(%p), replica_groups={}, to_apply=%add", 4),
        ("replica_count=2, num_partitions=4", "all-reduce(%p), replica_groups={}, to_apply=%add", 8),
        ("num_partitions=2", "all-reduce(%p), replica_groups={{0,1},{5,2}}, to_apply=%add", 6),
        ("num_partitions=2", "collective-permute(%p), channel_id=1, source_target_pairs={{0,3},{4,1}}", 5),
        ("num_partitions=9", "collective-permute(%p), channel_id=1, source_target_pairs={}", 9),
    ],
)
def test_a_module_runs_on_the_devices_that_it_declares_and_on_those_that_it_names(header, collective, count) -> None:
    assert read(module(f"ROOT %r = f32[8] {collective}", header=header)).num_devices == count


def test_a_module_tells_its_name_and_its_collectives_in_the_order_of_the_text() -> None:
    found = valid(module(reduce(ALL).replace("ROOT %r", "%b") + "\n" + reduce(ALL).replace("%r", "%a")))
    assert (found.name, [record.name for record in found.records]) == ("m", ["b", "a"])
    assert {record.computation for record in found.records} == {"main"}


def test_groups_of_unequal_size_are_flagged_and_the_largest_counts() -> None:
    record = only(module(reduce(FLAT + "replica_groups={{0,1,2,3,4,5},{6,7}}")))
    assert (record.group_size, record.flags, record.wire_bytes) == (6, ("uneven_groups",), 2 * 5 * 32 // 6)


def test_a_permute_to_oneself_or_to_nobody_moves_nothing() -> None:
    for pairs in ("{}", "{{0,0},{1,1}}"):
        text = f"ROOT %r = f32[8] collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
        assert only(module(text)).wire_bytes == 0


# How many bytes.


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


# Asynchronous forms.


def test_a_start_that_says_is_sync_is_not_asynchronous() -> None:
    for config in (
        '{"collective_backend_config":{"is_sync":true}}',
        r'"{\"is_sync\":true,\"no_parallel_custom_call\":false}"',
    ):
        text = f"%s = f32[8] all-reduce-start(%p), {ALL}, to_apply=%add, backend_config={config}\n"
        assert not only(module(text + "ROOT %d = f32[8] all-reduce-done(%s)")).is_async


WRAPPED = """
%inner (x: f32[8]) -> f32[64] {
  %x = f32[8] parameter(0)
  ROOT %ag = f32[64] all-gather(%x), channel_id=1, use_global_device_ids=true, replica_groups=[1,8]<=[8], dimensions={0}
}
%wrapped (y: f32[8]) -> f32[64] {
  %y = f32[8] parameter(0)
  ROOT %c = f32[64] call(%y), to_apply=%inner
}
"""


@pytest.mark.parametrize("callee", ["%inner", "%wrapped"])
def test_an_async_wrapper_counts_once_though_start_update_and_done_all_name_it(callee: str) -> None:
    text = f"""%s = ((f32[8]), f32[64], u32[]) async-start(%p), calls={callee}
    %u = ((f32[8]), f32[64], u32[]) async-update(%s), calls={callee}
    ROOT %d = f32[64] async-done(%u), calls={callee}"""
    (record,) = read(module(text, WRAPPED)).records  # XLA's parser of today takes calls= at the start only
    assert brief(record) == ("all_gather", 256, 8, (1, 1)) and record.is_async
    record = only(
        module("\n".join(text.replace(f", calls={callee}", "", 3).splitlines()), WRAPPED).replace(
            "async-start(%p)", f"async-start(%p), calls={callee}"
        )
    )
    assert brief(record) == ("all_gather", 256, 8, (1, 1)) and record.is_async


def test_an_asynchronous_call_makes_what_it_calls_asynchronous() -> None:
    text = """%s = ((f32[8]), f32[64], u32[]) call-start(%p), async_execution_thread="sparsecore", to_apply=%inner
    ROOT %d = f32[64] call-done(%s)"""
    record = read(module(text, WRAPPED.replace("}\n%wrapped", '}, execution_thread="sparsecore"\n%wrapped'))).records[0]
    assert record.is_async and record.name == "ag" and record.computation == "inner"


def test_copies_of_one_collective_in_async_collective_fusions_are_one() -> None:
    gather = "all-gather(%x), channel_id=7, use_global_device_ids=true, replica_groups=[1,8]<=[8], dimensions={0}"
    fused = "".join(
        f"%fused.{i} (x: f32[8]) -> f32[64] {{\n  %x = f32[8] parameter(0)\n"
        f'  ROOT %ag.{i} = f32[64] {gather}, frontend_attributes={{chain_id="{i // 3}"}}\n}}\n'
        for i in range(6)
    )
    calls = "\n".join(f"%f.{i} = f32[64] fusion(%p), kind=kCustom, calls=%fused.{i}" for i in range(6))
    found = valid(module(calls, fused)).records
    assert [(record.name, record.payload_bytes, record.is_async) for record in found] == [
        ("ag.0", 256, True),
        ("ag.3", 256, True),
    ]


def test_copies_are_of_one_collective_only_within_a_computation() -> None:
    """A fusion in a fusion is part of the computation around both; another computation has another collective."""
    gather = f'all-gather(%x), {ALL}, dimensions={{0}}, frontend_attributes={{chain_id="3"}}'
    text = ""
    for part in ("a", "b"):
        for copy in (0, 1):
            text += f"""%inner.{part}{copy} (x: f32[8]) -> f32[64] {{
              %x = f32[8] parameter(0)
              ROOT %ag.{part}{copy} = f32[64] {gather}
            }}
            %outer.{part}{copy} (x: f32[8]) -> f32[64] {{
              %x = f32[8] parameter(0)
              ROOT %f = f32[64] fusion(%x), kind=kLoop, calls=%inner.{part}{copy}
            }}
            """
        text += f"""%part.{part} (x: f32[8]) -> f32[64] {{
          %x = f32[8] parameter(0)
          %f0 = f32[64] fusion(%x), kind=kCustom, calls=%outer.{part}0
          ROOT %f1 = f32[64] fusion(%x), kind=kCustom, calls=%outer.{part}1
        }}
        """
    calls = "%c = f32[64] call(%p), to_apply=%part.a\n%d = f32[64] call(%p), to_apply=%part.b"
    assert [record.name for record in valid(module(calls, text)).records] == ["ag.a0", "ag.b0"]


def test_only_a_custom_fusion_named_all_reduce_scatter_is_a_reduce_scatter() -> None:
    inside = f"""%all-reduce-scatter.1 (x: f32[8]) -> f32[1] {{
      %x = f32[8] parameter(0)
      %ar = f32[8] all-reduce(%x), {ALL}, to_apply=%add
      %z = s32[] constant(0)
      ROOT %ds = f32[1] dynamic-slice(%ar, %z), dynamic_slice_sizes={{1}}
    }}"""
    fused = only(module("ROOT %f = f32[1] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1", inside))
    assert (brief(fused)[:3], fused.wire_bytes) == (("reduce_scatter", 32, 8), 28)
    called = only(module("ROOT %f = f32[1] call(%p), to_apply=%all-reduce-scatter.1", inside))
    assert called.op == "all_reduce"


# Sends and receives.

PAIRS = "_xla_send_recv_source_target_pairs"


def transfers(pairs: str, channel: int, number: str = "", extra: str = "") -> str:
    attributes = f"channel_id={channel}{extra}" + (f", frontend_attributes={{{PAIRS}={pairs}}}" if pairs else "")
    return f"""%recv{number} = (f32[8], u32[], token[]) recv(%tok), {attributes}
    %send{number} = (f32[8], u32[], token[]) send(%p, %tok), {attributes}
    %rd{number} = (f32[8], token[]) recv-done(%recv{number}), channel_id={channel}{extra}
    %sd{number} = token[] send-done(%send{number}), channel_id={channel}{extra}
    """


def test_two_pairs_of_send_and_receive_on_one_channel_are_two_permutes() -> None:
    text = module(transfers("{{0,1},{1,2}}", 1) + transfers('"{{3,0}}"', 1, ".1"))
    assert [record.edges for record in valid(text).records] == [((0, 1), (1, 2)), ((3, 0),)]
    assert all(record.op == "collective_permute" and record.payload_bytes == 32 for record in valid(text).records)


def test_transfers_to_and_from_the_host_are_no_collectives() -> None:
    assert valid(module(transfers("", 1, extra=", is_host_transfer=true"))).records == []
    named = ', frontend_attributes={_xla_host_transfer_handler_name="h"}'
    assert valid(module(transfers("", 1, extra=named))).records == []
    assert [r.edges for r in valid(module(transfers("", 1, extra=", is_host_transfer=false"))).records] == [None]


def test_a_send_and_a_receive_on_two_channels_are_two_permutes() -> None:
    text = transfers("{{0,1}}", 1).replace("    ", "").splitlines()
    text = [line.replace("channel_id=1", "channel_id=2") if "%r" in line[:6] else line for line in text]
    found = valid(module("\n".join(text))).records
    assert [record.name for record in found] == ["recv", "send"] and {record.is_async for record in found} == {True}


def test_a_receive_whose_send_is_in_another_program_still_counts() -> None:
    text = "\n".join(line for line in transfers("{{0,1}}", 1).splitlines() if "send(" not in line and "%sd" not in line)
    assert brief(only(module(text)))[:2] == ("collective_permute", 32)


# Phase and source.


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(f)/jvp()/dot_general", "forward"),
        ("jit(f)/transpose(jvp())/dot_general", "backward"),
        ("jit(f)/transpose(jvp(checkpoint))/rematted_computation/dot", "backward"),
        ("jit(f)/(jvp()/reduce_sum:transpose(jvp())/dot_general)", "backward"),
        ("jit(step)/optimizer/add", "update"),
        ("jit(f)/jit(transpose)/transpose", "other"),
        ("jit(f)/dynamic_update_slice", "other"),
        ("", "other"),
    ],
)
def test_phase_comes_from_op_name(op_name: str, phase: str) -> None:
    assert only(module(reduce(ALL) + f', metadata={{op_name="{op_name}"}}')).phase == phase


def test_a_collective_that_lost_its_name_takes_the_latest_phase_that_it_reads() -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="jit(f)/jvp()/neg"}}
    %b = f32[8] negate(%f), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %c = f32[8] copy(%b)
    %x = (f32[8], f32[8]) all-reduce(%f, %c), {ALL}, to_apply=%add
    %y = f32[8] all-reduce(%f), {ALL}, to_apply=%add"""
    assert [record.phase for record in valid(module(text)).records] == ["backward", "forward"]


def test_what_is_combined_runs_when_its_last_operand_is_there_whatever_its_name() -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="jit(f)/jvp()/neg"}}
    %b = f32[8] negate(%f), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %x = (f32[8], f32[8]) all-reduce(%f, %b), {ALL}, to_apply=%add, metadata={{op_name="jit(f)/jvp()/psum"}}"""
    assert only(module(text)).phase == "backward"


def test_the_name_of_an_argument_tells_no_phase() -> None:
    text = '%q = f32[8] parameter(1), metadata={op_name="optimizer"}\n' + reduce(ALL, operands="%q")
    assert only(module(text)).phase == "other"


def test_a_gather_of_parameters_takes_the_earliest_phase_that_reads_it() -> None:
    text = f"""%g = f32[64] all-gather(%p), {ALL}, dimensions={{0}}
    %h = f32[64] copy(%g)
    %b = f32[64] negate(%h), metadata={{op_name="jit(f)/transpose(jvp())/neg"}}
    %f = f32[64] negate(%h), metadata={{op_name="jit(f)/jvp()/neg"}}"""
    assert only(module(text)).phase == "forward"


def test_a_gather_of_what_the_optimizer_computed_is_update_and_a_sum_of_gradients_backward() -> None:
    text = f"""%g = f32[8] negate(%p), metadata={{op_name="jit(step)/transpose(jvp())/neg"}}
    %sum = f32[8] all-reduce(%g), {ALL}, to_apply=%add, metadata={{op_name="jit(step)/psum"}}
    %new = f32[8] subtract(%p, %sum), metadata={{op_name="jit(step)/sub"}}
    ROOT %all = f32[64] all-gather(%new), {ALL}, dimensions={{0}}, metadata={{op_name="jit(step)/sub"}}"""
    assert [record.phase for record in valid(module(text)).records] == ["backward", "update"]


def test_phase_of_a_nameless_collective_in_a_called_computation_is_that_of_the_caller() -> None:
    text = 'ROOT %w = f32[8] call(%p), to_apply=%yes, metadata={op_name="jit(f)/transpose(jvp())/x"}'
    assert only(module(text, CHOSEN)).phase == "backward"


JVP, TRANSPOSE = "jit(f)/jvp()/x", "jit(f)/transpose(jvp())/x"


@pytest.mark.parametrize(
    ("names", "phase"),
    [
        ((TRANSPOSE, TRANSPOSE), "backward"),
        ((JVP, JVP), "forward"),
        ((JVP, TRANSPOSE), "other"),
        ((JVP, ""), "other"),
        (("", ""), "other"),
    ],
)
def test_callers_tell_a_phase_if_they_agree(names: tuple[str, str], phase: str) -> None:
    """The nameless collective is two calls deep; what is called twice has the phase that both callers have."""
    middle = """%middle (x: f32[8]) -> f32[8] {
      %x = f32[8] parameter(0)
      ROOT %c = f32[8] call(%x), to_apply=%yes
    }"""
    calls = "\n".join(
        f'%w.{i} = f32[8] call(%p), to_apply=%middle, metadata={{op_name="{name}"}}' for i, name in enumerate(names)
    )
    record = only(module(calls, CHOSEN + middle))
    assert (record.phase, brief(record)[3]) == (phase, (2, 2))


READ = {  # what the nameless collective reads, and its phase
    f'negate(%p), metadata={{op_name="{TRANSPOSE}"}}': "backward",
    f'constant({{1,1,1,1,1,1,1,1}}), metadata={{op_name="{TRANSPOSE}"}}': "other",  # a value that others share
    'copy(%g), metadata={op_name="jit(f)/copy"}': "backward",  # gradients moved are gradients
    "negate(%g)": "backward",  # and so are those of which nothing is said
    'negate(%g), metadata={op_name="jit(f)/neg"}': "update",  # arithmetic that differentiation did not write
    'negate(%f), metadata={op_name="jit(f)/neg"}': "forward",
    f'negate(%g), metadata={{op_name="{JVP}"}}': "forward",
}


@pytest.mark.parametrize("read", READ)
def test_a_nameless_collective_has_the_phase_of_what_it_reads(read: str) -> None:
    text = f"""%f = f32[8] negate(%p), metadata={{op_name="{JVP}"}}
    %g = f32[8] negate(%p), metadata={{op_name="{TRANSPOSE}"}}
    %x = f32[8] {read}
    {reduce(ALL, operands="%x")}"""
    assert only(module(text)).phase == READ[read]


def test_what_reads_a_collective_tells_where_nothing_else_does_and_a_name_of_its_own_comes_first() -> None:
    gather = f"%r = f32[64] all-gather(%p), {ALL}, dimensions={{0}}"
    reader = '%y = f32[64] negate(%r), metadata={{op_name="{0}"}}'
    for name, phase in ((JVP, "forward"), (TRANSPOSE, "backward"), ("jit(f)/optimizer/x", "update")):
        assert only(module(f"{gather}\n{reader.format(name)}")).phase == phase
    named = f'{gather}, metadata={{op_name="{TRANSPOSE}"}}\n{reader.format(JVP)}'
    assert only(module(named)).phase == "backward"


TABLES = """
FileNames
1 "model.py"
2 "dir/train \\"x\\".py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=3 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}

"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ('op_name="x" stack_frame_id=2', "model.py:12"),
        ('op_name="stack_frame_id=2" source_file="a/b.py" source_line=7', "a/b.py:7"),
        ('op_name="x"', None),
        ('op_name="x" stack_frame_id=0', None),
    ],
)
def test_source_line_comes_from_the_stack_frame_tables_or_from_the_metadata(metadata: str, source: str | None) -> None:
    text = module(reduce(ALL) + f", metadata={{{metadata}}}").replace(
        "num_partitions=8\n", "num_partitions=8\n" + TABLES
    )
    assert only(text).source == source
