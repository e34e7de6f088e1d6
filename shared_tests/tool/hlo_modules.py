"""HLO modules for tests: an ENTRY around a few instructions, and what XLA's own parser makes of text."""

from __future__ import annotations

import pytest

from shardiff.hlo import Module, read
from shardiff.record import Record

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def module(body: str, computations: str = "", header: str = "num_partitions=8") -> str:
    """A module around the instructions of ENTRY, which may use %p: f32[8] and %tok: token[]."""
    lines = "\n".join("  " + line.strip() for line in body.strip().splitlines())
    entry = f"ENTRY main {{\n  %p = f32[8]{{0}} parameter(0)\n  %tok = token[] after-all()\n{lines}\n}}\n"
    return f"HloModule m, {header}\n{ADD}{computations}\n{entry}"


def xla_parse(text: str):
    """XLA's own parse; raises where XLA would."""
    hlo = pytest.importorskip("jaxlib._hlo")
    return hlo.hlo_module_from_text(text)


def valid(text: str) -> Module:
    """What the reader makes of a text that XLA's parser accepts."""
    xla_parse(text)
    return read(text)


def only(text: str) -> Record:
    """The one record of a text that XLA's parser accepts."""
    (record,) = valid(text).records
    return record


def brief(record: Record) -> tuple:
    return record.op, record.payload_bytes, record.group_size, (record.executions.min, record.executions.max)


def reduce(attributes: str, shape: str = "f32[8]", operands: str = "%p") -> str:
    return f"ROOT %r = {shape} all-reduce({operands}), {attributes}, to_apply=%add"


FLAT = "channel_id=1, use_global_device_ids=true, "
ALL = FLAT + "replica_groups={{0,1,2,3,4,5,6,7}}"

# Called computations: %yes holds one collective, %chosen calls it on one of three branches.
CHOSEN = f"""
    %yes (x: f32[8]) -> f32[8] {{
      %x = f32[8] parameter(0)
      ROOT %y = f32[8] all-reduce(%x), {ALL}, to_apply=%add
    }}
    %no (x: f32[8]) -> f32[8] {{
      ROOT %x = f32[8] parameter(0)
    }}
    %chosen (x: f32[8]) -> f32[8] {{
      %x = f32[8] parameter(0)
      %k = s32[] constant(0)
      ROOT %o = f32[8] conditional(%k, %x, %x, %x), branch_computations={{%no, %yes, %no}}
    }}
"""
