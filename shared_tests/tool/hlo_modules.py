"""HLO modules for tests: the cases, an ENTRY around a few instructions, and what XLA's own parser makes of text."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from shardiff.hlo import COLLECTIVES, Module, read
from shardiff.hlo.instruction import instruction
from shardiff.hlo.text import parse
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


CASES = Path(__file__).parent / "hlo_cases"
GOOD = sorted(path for path in CASES.rglob("*.hlo.txt") if not path.name.startswith("bad_"))
REAL = sorted((CASES / "real").glob("*.hlo.txt"))


def opcode_of(instruction) -> str:
    """all-reduce-start for kAllReduceStart, and so for every collective."""
    name = str(instruction.opcode).rpartition(".k")[2]
    return "".join("-" + c.lower() if c.isupper() else c for c in name).lstrip("-")


def xla_parse_its_own(text: str):
    """XLA's own parse of what this jaxlib's compiler has printed; the test is skipped if it refuses even that.

    Some versions do: jaxlib 0.11.2 prints the start of a GPU's all-reduce in a form that it cannot read, and text for
    tpu7x that makes its parser abort. So a version that is not the tested one first tries in another process.
    """
    if not version("jaxlib").startswith("0.10."):
        code = "import sys; from jaxlib import _hlo; _hlo.hlo_module_from_text(sys.stdin.read())"
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True)
        if done.returncode:
            why = " ".join(done.stderr.split())[-300:] or f"it ends with status {done.returncode}"
            pytest.skip(f"jaxlib {version('jaxlib')} cannot parse what its own compiler has printed: {why}")
    return xla_parse(text)


def assert_same_instructions(text: str, its_own: bool = False) -> None:
    """The collectives are those that XLA's parser sees, with the same operands, shapes and groups.

    its_own: this jaxlib's compiler has printed the text, see `xla_parse_its_own`.
    """
    program = parse(text, COLLECTIVES)
    native = {}
    for computation in (xla_parse_its_own if its_own else xla_parse)(text).computations():
        for found in computation.instructions():
            opcode = opcode_of(found)
            if opcode == "async-start" and found.async_wrapped_root() is not None:
                opcode = opcode_of(found.async_wrapped_root()) + "-start"
            if opcode in COLLECTIVES:
                native[computation.name, found.name] = opcode, found
    printed = {computation for computation, _ in program.interesting}
    seen = {}
    for computation, statement in program.interesting:
        site = instruction(text, statement)
        seen[computation, site.name] = site.opcode
        _, found = native[computation, site.name]
        line = re.sub(r"%|/\*index=\d+\*/", "", found.to_string())
        assert site.operands == tuple(operand.name for operand in found.operands())
        assert f" = {' '.join(site.shape.split())} {site.opcode}(" in line
        for name in ("replica_groups", "source_target_pairs", "channel_id"):
            if name in site.attributes:
                assert f", {name}={site.attributes[name]}" in line
    assert seen == {key: opcode for key, (opcode, _) in native.items() if key[0] in printed}


def loop(
    name: str = "w",
    trips: int | None = None,
    start: str = "constant(0)",
    bound: str = "constant(5)",
    step: str = "add(%i, %one)",
    test: str = "compare(%i, %n), direction=LT",
    inside: str = f"all-reduce(%v), {ALL}, to_apply=%add",
) -> tuple[str, str]:
    """(computations, instructions of ENTRY) of a while loop around one collective."""
    config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else ""
    computations = f"""
    %{name}.body (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
      %t = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[8] get-tuple-element(%t), index=1
      %one = s32[] constant(1)
      %three = s32[] constant(3)
      %j = s32[] {step}
      %c = f32[8] {inside}
      ROOT %r = (s32[], f32[8]) tuple(%j, %c)
    }}
    %{name}.cond (t: (s32[], f32[8])) -> pred[] {{
      %t = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %n = s32[] {bound}
      ROOT %lt = pred[] {test}
    }}
    """
    return (
        computations,
        f"""%{name}.z = s32[] {start}
    %{name}.t = (s32[], f32[8]) tuple(%{name}.z, %p)
    %{name} = (s32[], f32[8]) while(%{name}.t), condition=%{name}.cond, body=%{name}.body{config}
    """,
    )
