"""Asynchronous collectives, and transfers in two halves: each is counted once, however many instructions name it."""

from __future__ import annotations

import pytest

from shardiff.hlo import read
from shared_tests.tool.hlo_modules import ALL, brief, module, only, valid

# Asynchronous forms.


def test_a_start_that_says_is_sync_is_not_asynchronous() -> None:
    for config in (
        '{"collective_backend_config":{"is_sync":true}}',
        r'"{\"is_sync\":true,\"no_parallel_custom_call\":false}"',
    ):
        text = f"%s = f32[8] all-reduce-start(%p), {ALL}, to_apply=%add, backend_config={config}\n"
        assert not only(module(text + "ROOT %d = f32[8] all-reduce-done(%s)")).is_async


@pytest.mark.parametrize("shape", ["((f32[8]), f32[8])", "((f32[2], f32[6]), (f32[2], f32[6]))"])
def test_an_all_reduce_s_start_in_the_form_of_jax_0_11_counts_what_comes_out_alone(shape: str) -> None:
    # XLA's parser of jax 0.10 does not know this form, and that of 0.11 not the attribute that it is printed with.
    operands = "%p, %p" if shape.count("f32") > 2 else "%p"
    aliasing = "output_to_operand_aliasing={{1}: (0, {})}"
    text = f"%s = {shape} all-reduce-start({operands}), {ALL}, to_apply=%add, {aliasing}\n"
    (record,) = read(module(text + "ROOT %d = f32[8] all-reduce-done(%s)")).records
    assert brief(record) == ("all_reduce", 32, 8, (1, 1)) and record.is_async


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
    called = WRAPPED if callee == "%wrapped" else WRAPPED.partition("%wrapped")[0]
    (record,) = read(module(text, called)).records  # XLA's parser of today takes calls= at the start only
    assert brief(record) == ("all_gather", 256, 8, (1, 1)) and record.is_async
    record = only(
        module("\n".join(text.replace(f", calls={callee}", "", 3).splitlines()), called).replace(
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
