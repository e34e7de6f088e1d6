"""A sample of `make realprograms`: whole programs are read as XLA's own parser sees them; see that folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared_tests.tool.realprograms import __main__ as campaign
from shared_tests.tool.realprograms import oracle

pytest.importorskip("jaxlib._hlo")
SAMPLE = [("flax_linen", "language_model"), ("written", "experts"), ("written", "pipeline")]


@pytest.mark.parametrize(("file", "function"), SAMPLE, ids=["linen", "experts", "pipeline"])
def test_a_program_holds_what_xla_s_parser_sees_along_the_axes_of_its_mesh(file, function):
    (result,) = campaign.measure([(file, function)], ["cpu:8"])
    assert result.flaws == ()
    assert f"[{file}.py]({file}.py):{function} | cpu:8 | {result.program.mesh} |" in campaign.report([result])


def test_what_is_not_as_it_should_be_is_told():
    text = """HloModule m, num_partitions=4
    add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
    ENTRY main { p = f32[8] parameter(0) ROOT r = f32[8] all-reduce(p), replica_groups={{0,1},{2,3}}, to_apply=add }"""
    import shardiff

    program = shardiff.read(text, mesh="dp=2,tp=2")
    assert oracle.collectives(text) == {"all_reduce": 1}
    assert list(campaign.check(program, text, {"dp": 2, "tp": 2})) == []
    lost = replace(program, records=())
    assert list(campaign.check(lost, text, {"dp": 2, "tp": 2})) == [
        "read {}, XLA's parser sees {'all_reduce': 1}",
        "no communication",
    ]
    assert list(campaign.check(shardiff.read(text, mesh="dp=4"), text, {"dp": 4})) == ["along no axis: ['r']"]
