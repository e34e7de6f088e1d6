"""An all-reduce whose operand is zeros but for a rank's own slice gathers, and is read as that."""

from __future__ import annotations

import pytest

from shared_tests.tool.hlo_modules import ALL, module, only

JVP, TRANSPOSE = "jit(f)/jvp()/mul", "jit(f)/transpose(jvp())/mul"
FUSED = """
    %fused (x: f32[64], y: f32[8], i: u32[]) -> (f32[8], f32[64]) {
      %x = f32[64] parameter(0)
      %y = f32[8] parameter(1)
      %i = u32[] parameter(2)
      %v = f32[8] reduce-precision(%y), exponent_bits=8, mantissa_bits=23
      %u = f32[64] dynamic-update-slice(%x, %v, %i)
      ROOT %t = (f32[8], f32[64]) tuple(%v, %u)
    }
    %alone (x: f32[64], y: f32[8], i: u32[]) -> f32[64] {
      %x = f32[64] parameter(0)
      %y = f32[8] parameter(1)
      %i = u32[] parameter(2)
      ROOT %u = f32[64] dynamic-update-slice(%x, %y, %i)
    }
"""
START = """%zero = f32[] constant(0)
    %one = f32[] constant(1)
    %zeros = f32[64] broadcast(%zero), dimensions={}
    %ones = f32[64] broadcast(%one), dimensions={}
    %i = u32[] constant(8)
"""
OPERANDS = {  # how the operand is made, and whether its sum gathers
    "%o = f32[64] dynamic-update-slice(%zeros, %p, %i)": True,
    "%o = f32[64] fusion(%zeros, %p, %i), kind=kLoop, calls=%alone": True,
    "%f = (f32[8], f32[64]) fusion(%zeros, %p, %i), kind=kLoop, calls=%fused\n"
    "%o = f32[64] get-tuple-element(%f), index=1": True,
    "%d = f32[64] dynamic-update-slice(%zeros, %p, %i)\n%o = f32[64] copy(%d)": True,
    "%o = f32[64] dynamic-update-slice(%ones, %p, %i)": False,
    "%o = f32[64] fusion(%ones, %p, %i), kind=kLoop, calls=%alone": False,
    "%b = f32[64] negate(%zeros)\n%o = f32[64] dynamic-update-slice(%b, %p, %i)": False,
    "%d = f32[64] dynamic-update-slice(%zeros, %p, %i)\n%o = f32[64] negate(%d)": False,
    "%o = f32[64] broadcast(%one), dimensions={}": False,
}


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_sum_of_slices_in_zeros_gathers(operand: str) -> None:
    text = module(f"{START}{operand}\nROOT %r = f32[64] all-reduce(%o), {ALL}, to_apply=%add", FUSED)
    assert only(text).gathers is OPERANDS[operand]


def test_of_a_combined_sum_each_operand_is_told() -> None:
    body = f"""{START}%o = f32[64] dynamic-update-slice(%zeros, %p, %i)
    ROOT %r = (f32[64], f32[8]) all-reduce(%o, %p), {ALL}, to_apply=%add"""
    record = only(module(body))
    assert [part.gathers for part in record.parts] == [True, False] and not record.gathers


@pytest.mark.parametrize(
    ("operand", "readers", "phase"),
    [
        ("dynamic-update-slice(%zeros, %n, %i)", [TRANSPOSE], "backward"),  # gathered again for the backward pass alone
        ("dynamic-update-slice(%zeros, %n, %i)", [JVP, TRANSPOSE], "forward"),
        ("dynamic-update-slice(%ones, %n, %i)", [TRANSPOSE], "forward"),  # a sum has the phase of its addends
    ],
)
def test_who_reads_a_gather_by_sum_tells_its_phase(operand: str, readers: list[str], phase: str) -> None:
    lines = [f'%y{i} = f32[64] negate(%r), metadata={{op_name="{name}"}}' for i, name in enumerate(readers)]
    body = f"""{START}%n = f32[8] negate(%p), metadata={{op_name="{JVP}"}}
    %o = f32[64] {operand}
    %r = f32[64] all-reduce(%o), {ALL}, to_apply=%add
    """
    assert only(module(body + "\n".join(lines))).phase == phase
