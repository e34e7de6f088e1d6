"""A sample of `make realprograms`: whole programs are read as XLA's own parser sees them; see that folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardiff.ranks.supervisor import Workers
from shardiff.tracing.calls import Call
from shardiff.tracing.merge import program_of
from shared_tests.tool.realprograms import __main__ as campaign
from shared_tests.tool.realprograms import oracle, torch_half, torch_oracle

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


@pytest.mark.parametrize("name", ["hsdp", pytest.param("interleaved", marks=pytest.mark.long)])
def test_a_torch_program_has_the_calls_that_torch_counts_and_the_bytes_of_the_formula(pool: Workers, name: str) -> None:
    result = torch_half.measured(pool, name)
    assert result.flaws == () and result.skipped is None
    assert f"[torch_programs.py](torch_programs.py):{name} | " in torch_half.report([result])


def test_a_library_that_is_not_there_is_skipped_with_the_reason(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(torch_half.PROGRAMS["llama_ddp"].PROGRAMS["llama_ddp"], package="nothing_of_this_name")
    monkeypatch.setitem(torch_half.PROGRAMS["llama_ddp"].PROGRAMS, "llama_ddp", known)
    result = torch_half.measured(pool, "llama_ddp")
    assert result.skipped == "nothing_of_this_name is not installed" and result.flaws == ()
    assert "| skipped: nothing_of_this_name is not installed |" in torch_half.report([result])


def test_what_torch_counts_otherwise_is_told() -> None:
    calls = [Call(0, "all_reduce"), Call(0, "reduce_scatter"), Call(0, "send"), Call(0, "wait"), Call(0, "mark")]
    mode, gloo = {"all_reduce": 1, "reduce_scatter": 1}, {"all_reduce": 2, "send": 1}
    assert torch_oracle.flaws(calls, mode, gloo) == []
    assert torch_oracle.flaws(calls, {"all_reduce": 1}, gloo) == [
        "traced {'all_reduce': 1, 'reduce_scatter': 1}, CommDebugMode counts {'all_reduce': 1}"
    ]
    assert torch_oracle.flaws(calls, mode, {"all_reduce": 2}) == [
        "traced {'all_reduce': 1, 'reduce_scatter': 1, 'send': 1}, gloo ran {'all_reduce': 2}"
    ]
    ranks = [(calls, mode, gloo)]
    program = program_of([calls])
    assert list(torch_half.check(program, ranks, 8))[-1] == "0 steps are told of 3"
    assert torch_oracle.op_of("c10d._reduce_scatter_base_") == "reduce_scatter"
    with pytest.raises(ValueError, match="no op of a collective in 'gloo:new'"):
        torch_oracle.op_of("gloo:new")
