"""What XLA derives beside what is written: for each strategy and target, all is the same or under a named rule."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import jax
import pytest

from contract import cost
from contract.axes import AXES, STRATEGIES, one_axis
from contract.problem import Problem
from contract.strategy import Run
from jax_impl import compiled as targets
from shardiff import hlo
from shardiff.cli import main as cli
from shardiff.compiling.hardware import has_compiler, parse
from shardiff.diff.rows import align, unexplained
from shardiff.diff.rules import WHY
from shardiff.record import step_bytes
from shared_tests.bench.pools import shared
from shared_tests.evidence import often
from shared_tests.tool.hlo_modules import assert_same_instructions

# What every diff comes to at width 1024, batch 256, 4 layers (8 for the pipeline): how many rows under which rules.
COMBINED = {("combined", "moved"): 1}
SAME_TP = {(): 7}
SAME_MEGATRON = {(): 3}
TICKS = ("loop", "bubble_ticks")
TICKS_BF16 = ("loop", "dtype", "bubble_ticks")
GOLDEN = {
    ("data_parallel", "cpu:8"): COMBINED,
    ("data_parallel", "h100:8"): COMBINED,
    ("data_parallel", "v5e:2x4"): COMBINED,
    ("tensor_parallel", "cpu:8"): {
        (): 3,
        ("unfused_reduce_scatter",): 2,
        ("unfused_reduce_scatter", "combined", "moved"): 1,
    },
    ("tensor_parallel", "h100:8"): SAME_TP,
    ("tensor_parallel", "v5e:2x4"): {(): 4, ("dtype", "gathered_again"): 2, ("dtype",): 1},
    ("megatron_tensor_parallel", "cpu:8"): SAME_MEGATRON,
    ("megatron_tensor_parallel", "h100:8"): SAME_MEGATRON,
    ("megatron_tensor_parallel", "v5e:2x4"): SAME_MEGATRON,
    ("pipeline_parallel", "cpu:8"): {(): 1, TICKS: 2},
    ("pipeline_parallel", "h100:8"): {(): 1, TICKS: 2},
    ("pipeline_parallel", "v5e:2x4"): {(): 1, TICKS: 1, TICKS_BF16: 1},
}
WIRE = {  # of a rank in one step, by shared answers that were checked by hand
    ("fully_sharded", False): {"cpu:8": 44_083_207, "h100:8": 29_388_807, "v5e:2x4": 22_063_111},
    ("zero1", None): {"cpu:8": 44_083_207, "h100:8": 29_388_807, "v5e:2x4": 29_403_143},
    ("zero2", None): {"cpu:8": 44_083_207, "h100:8": 29_388_807, "v5e:2x4": 29_403_143},
}
if jax.__version_info__ >= (0, 11):  # their TPU compiler keeps one of the gathered arrays more
    GOLDEN["tensor_parallel", "v5e:2x4"] = {(): 4, ("dtype", "gathered_again"): 1, ("dtype",): 2}
NAIVE = {"cpu:8": 47_867_911, "h100:8": 33_173_511, "v5e:2x4": 24_471_559}


def needs_compiler(target: str) -> None:
    if not has_compiler(parse(target).kind):
        pytest.skip(f"the compiler for {target} is not installed; extra: compilers")


@functools.cache
def compiled(run: Run, target: str, precision: str = "default") -> targets.Compiled:
    return targets.compile(run, parse(target), precision)


def written_and_derived(run: Run, target: str):
    derived = hlo.read(compiled(run, target).hlo).records
    return cost.communication(replace(run, implementation="torch")), derived


def assert_read_as_xla_reads_it(run: Run, target: str) -> None:
    """The last line of a test, because it skips where XLA cannot read what it has printed."""
    assert_same_instructions(compiled(run, target).hlo, its_own=True)


@pytest.mark.parametrize(("strategy", "target"), GOLDEN)
def test_every_difference_of_annotated_code_is_under_a_rule(strategy, target):
    needs_compiler(target)
    problem = Problem(256, 1024, 8 if strategy == "pipeline_parallel" else 4)
    run = Run("annotated", one_axis(strategy, 8), problem)
    written, derived = written_and_derived(run, target)
    rows = align(written, derived)
    assert unexplained(rows) == 0
    assert Counter(row.rules for row in rows) == GOLDEN[strategy, target]
    assert sum(row.bytes["left"] for row in rows) == step_bytes(written)
    assert sum(row.bytes["right"] for row in rows) == step_bytes(derived)
    assert_read_as_xla_reads_it(run, target)


@pytest.mark.parametrize("target", NAIVE)
@pytest.mark.parametrize(("strategy", "reshard"), [*often([*WIRE], [*WIRE][:2]), ("fully_sharded", "naive")])
def test_what_xla_derives_for_zero_has_the_known_bytes_and_every_difference_a_rule(strategy, reshard, target):
    needs_compiler(target)
    spelling = {"spelling": "naive"} if reshard == "naive" else {"reshard": reshard}
    run = Run("annotated", one_axis(strategy, 8), Problem(256, 1024, 4), **spelling)  # type: ignore[arg-type]
    text = compiled(run, target).hlo
    written = cost.communication(replace(run, implementation="torch", spelling="best"))
    derived = hlo.read(text).records
    assert step_bytes(derived) == (NAIVE if reshard == "naive" else WIRE[strategy, reshard])[target]
    rows = align(written, derived)
    assert unexplained(rows) == 0
    assert sum(row.bytes["right"] for row in rows) == step_bytes(derived)
    if (reshard, target) == ("naive", "h100:8"):
        resharded = [r for row in rows if "resharded" in row.rules for r in row.right if r.op == "all_to_all"]
        assert sum(r.times for r in resharded) == 9


@pytest.mark.parametrize("degree", often([2, 8], [8]))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shard_map_compiles_to_the_predicted_bytes_exactly(strategy, degree):
    """The same bytes exactly, and the same collectives except for those that the compiler combines into one."""
    run = Run("shard_map", one_axis(strategy, degree), Problem(24, 32, 8), microbatches=3, reshard=False)
    written, derived = written_and_derived(run, f"cpu:{degree}")
    assert step_bytes(derived) == step_bytes(written)
    each = {"split"} if AXES[strategy] == "fsdp" else set()  # torch sends w and b of a layer together
    assert {rule for row in align(written, derived) for rule in row.rules} <= {"combined", "moved"} | each
    if strategy != "data_parallel" and not each:
        assert {row.verdict for row in align(written, derived)} == {"same"}
    assert_read_as_xla_reads_it(run, f"cpu:{degree}")


@pytest.mark.parametrize("strategy", often(STRATEGIES, ("pipeline_parallel", "tensor_parallel", "fully_sharded")))
def test_shard_map_on_h100_communicates_what_is_written(strategy):
    needs_compiler("h100:8")
    problem = Problem(64, 512, 8 if strategy == "pipeline_parallel" else 2)
    run = Run("shard_map", one_axis(strategy, 8), problem)
    written, derived = written_and_derived(run, "h100:8")
    assert step_bytes(derived) == step_bytes(written) and unexplained(align(written, derived)) == 0
    assert_read_as_xla_reads_it(run, "h100:8")


@pytest.mark.parametrize(
    "target", ["a100:8", "h200:2x8", "b200:8", "v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "v3:2x2"]
)
def test_on_every_other_target_the_reader_sees_what_xlas_parser_sees_and_no_row_is_unexplained(target):
    needs_compiler(target)
    run = Run("annotated", one_axis("tensor_parallel", parse(target).num_devices), Problem(256, 1024, 2))
    assert unexplained(align(*written_and_derived(run, target))) == 0
    assert_read_as_xla_reads_it(run, target)


def test_on_cpu_a_reduce_scatter_is_an_all_reduce_of_twice_the_wire_bytes():
    written, derived = written_and_derived(
        Run("annotated", one_axis("tensor_parallel", 8), Problem(256, 1024, 4)), "cpu:8"
    )
    assert [r.op for r in written].count("reduce_scatter") == 3 and all(r.op != "reduce_scatter" for r in derived)
    for row in align(written, derived):
        if row.rules == ("unfused_reduce_scatter",):
            assert row.bytes["right"] == 2 * row.bytes["left"] and "twice the wire bytes" in row.why


def found(program: targets.Compiled) -> Counter[tuple[str, str, str, int]]:
    """(phase, op, dtype, payload) of every collective, with its executions."""
    count: Counter[tuple[str, str, str, int]] = Counter()
    for r in hlo.read(program.hlo).records:
        assert r.executions.max is not None
        count[r.phase, r.op, r.dtype, r.payload_bytes] += r.executions.max
    return count


def test_tensor_parallel_as_each_compiler_has_it():
    for target in ("h100:8", "v5e:2x4"):
        needs_compiler(target)
    run, size = Run("annotated", one_axis("tensor_parallel", 8), Problem(256, 1024, 4)), 4 * 256 * 1024
    cpu, h100, v5e = (compiled(run, target) for target in ("cpu:8", "h100:8", "v5e:2x4"))
    exact = compiled(run, "v5e:2x4", "highest")
    gathers, scatters = ("all_gather", "float32", size), ("backward", "reduce_scatter", "float32", size)
    loss = ("forward", "all_reduce", "float32", 4)

    # the CPU's never scatters a sum: all_reduce, then a slice; the loss rides with one of them
    reduced = ("backward", "all_reduce", "float32", size)
    assert found(cpu) == {("forward", *gathers): 3, reduced: 2, (*reduced[:3], size + 4): 1}
    # the GPU's finds what the explicit code says
    assert found(h100) == {("forward", *gathers): 3, scatters: 3, loss: 1}
    assert len(re.findall(r" reduce-scatter(?:-start)?\(", h100.hlo)) == 3  # since jax 0.11 not all are asynchronous
    # the TPU's gathers in bfloat16, which its matrix units take anyway, and gathers again what it did not keep
    half = ("all_gather", "bfloat16", size // 2)
    again = GOLDEN["tensor_parallel", "v5e:2x4"]["dtype", "gathered_again"]
    assert found(v5e) == {("forward", *half): 3, ("backward", *half): again, scatters: 3, loss: 1}
    assert found(exact) == {("forward", *gathers): 3, ("backward", *gathers): again, scatters: 3, loss: 1}


def test_the_pipeline_of_annotations_has_a_formula_of_its_own():
    run = Run("annotated", one_axis("pipeline_parallel", 4), Problem(24, 32, 4), microbatches=3)
    derived = hlo.read(compiled(run, "cpu:4").hlo).records
    assert step_bytes(derived) == step_bytes(cost.communication(run))


@pytest.fixture(scope="module")
def output(pool) -> dict:
    """The JSON of a real diff: ranks traced, a program compiled."""
    command = ["diff", "tensor_parallel", "--degree", "2", "--json"]
    sizes = ["--width", "16", "--batch", "8", "--implementation", "shard_map", "--fail-on", "extra-bytes"]
    with shared(pool), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert (cli.main([*command, *sizes]), err.getvalue()) == (0, "")
    return json.loads(out.getvalue())


def test_json_has_the_schema(output):
    assert list(output) == [
        "schema",
        "strategy",
        "implementation",
        "target",
        "mesh",
        "left",
        "right",
        "rows",
        "unexplained",
        "extra_bytes",
        "closed_form",
    ]
    assert (output["strategy"], output["implementation"]) == ("tensor_parallel", "shard_map")
    assert (output["target"], output["mesh"], output["unexplained"]) == ("cpu:2", {"tp": 2}, 0)
    assert {"verdict", "rules", "left", "right", "bytes", "why"} == set(output["rows"][0])
    assert {"records", "totals"} <= set(output["left"]) & set(output["right"]) & set(output["closed_form"])


def test_what_is_written_is_traced_and_all_three_columns_agree(output):
    assert output["left"]["traced"] is True
    columns = [output[name]["totals"]["wire_bytes"] for name in ("left", "right", "closed_form")]
    assert columns[0] == columns[1] == columns[2]
    forward = [r for r in output["left"]["records"] if r["phase"] == "forward"]
    assert forward and all("torch_impl/explicit/tensor_parallel.py:" in r["source"] for r in forward)


def test_two_files_are_compared(output, tmp_path, capsys):
    """What trace and hlo print is what diff reads."""
    one, other = tmp_path / "trace.json", tmp_path / "hlo.json"
    one.write_text(json.dumps({"program": "p", "records": output["left"]["records"]}))
    other.write_text(json.dumps({"module": "m", "records": output["right"]["records"][1:]}))
    assert cli.main(["diff", str(one), str(one), "--fail-on", "unexplained", "--json"]) == 0
    assert {row["verdict"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"same"}
    assert cli.main(["diff", str(one), str(other)]) == 0
    assert "only trace.json" in capsys.readouterr().out
    assert cli.main(["diff", str(one), str(other), "--fail-on", "unexplained"]) == 1
    assert cli.main(["diff", str(one), str(other), "--fail-on", "extra-bytes"]) == 0
    assert cli.main(["diff", str(other), str(one), "--fail-on", "extra-bytes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "zero"], "unknown strategy 'zero'; known: data_parallel, "),
        (["diff", "tensor_parallel", "--implementation", "torch"], "unknown implementation 'torch' to diff torch with"),
        (["diff", "tensor_parallel", "--target", "h300:8"], "unknown target 'h300'; known: cpu, "),
        (["diff", "tensor_parallel", "--target", "cpu:2", "--degree", "4"], "degree 4 needs 4 devices, cpu:2 has 2"),
        (["diff", "tensor_parallel", "--degree", "0"], "degree must be at least 1, got 0"),
        (
            ["diff", "tensor_parallel", "--mesh", "dp=4"],
            "tensor_parallel needs the axis tp, which the mesh 'dp=4' does not have",
        ),
        (["diff", "tensor_parallel", "--mesh", "tp=4", "--degree", "2"], "mesh tp=4 and degree 2 do not agree"),
        (["diff", "tensor_parallel", "--width", "10"], "needs a width divisible by its degree: width 10, degree 4"),
        (["diff", "tensor_parallel", "--precision", "low"], "unknown precision 'low'; known: default, highest"),
        (["diff", "tensor_parallel", "--fail-on", "x"], "unknown fail-on 'x'; known: unexplained, extra-bytes"),
        (["diff", "tensor_parallel", "--picture", "x.pdf"], "the picture must be a .png file in an existing folder"),
        (["diff", "a", "b", "c"], "unknown strategy 'a'; known: data_parallel, "),
        (["diff", "nowhere.json", "nowhere.json"], "nowhere.json: no such file"),
        (["diff", "Makefile", "Makefile"], "Makefile: "),
    ],
)
def test_a_wrong_input_is_one_line_and_status_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


def test_records_that_are_none_are_refused(tmp_path, capsys):
    for content in ("[1]", "{}", '{"records": [3]}', '{"records": [{"op": 1}]}', '{"records": 1}', "[" * 100_000):
        file = tmp_path / "a.json"
        file.write_text(content)
        assert cli.main(["diff", str(file), str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_picture_is_drawn(tmp_path):
    from benchmarks import diff_view
    from benchmarks.diff_strategies import compare

    run = Run("annotated", one_axis("data_parallel", 4), Problem(8, 16, 2))
    written = cost.communication(replace(run, implementation="torch"))
    diff_view.picture([compare(run, "cpu:4", written, written)], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_explains_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "diff.md").read_text(encoding="utf-8")
    assert [rule for rule in WHY if f"| {rule.replace('_', ' ')} |" not in page] == []
