"""Options never give a traceback: there is an answer, or status 2 and a line that says what is wrong, before any start.

Commands run in this process through `shardiff.main`; what would measure is replaced by the fixture `nothing_starts`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks import memory_limit
from contract.axes import ON_AXES, one_axis
from contract.problem import Problem
from contract.strategy import Run
from shardiff.cli import main as cli
from shardiff.system import machine, memory
from shared_tests.tool.answers import say

NUMBERS = ["0", "-1", "1", "2", "3", "4", "8", "100000000", "1" * 30, "9" * 4000, "9" * 5000, "nan", "inf", "-inf"]
NUMBERS += ["1e400", "1.5", "٣", "", " ", "x", "0x10", "1_000", "\n", "--json", "-", "\udcff", "é", "[/]"]
NAMES = [
    "",
    "torch",
    "cpu",
    "auto",
    "cuda",
    "float32",
    "bfloat16",
    "sgd",
    "default",
    "highest",
    "unexplained",
    "slower",
]
NAMES += [
    "data_parallel",
    "single_device",
    "annotated",
    "shard_map",
    "jax",
    "peer",
    "all_reduce",
    "a\nb",
    "\udcff",
    "[/]",
    "interleaved",
    "zb_v",
    "transformer",
    "ring_attention",
    "expert_parallel",
    "block",
]
NAMES += [
    "cpu:8",
    "cpu:0",
    "cpu:٣",
    "h100:2x8",
    "h100:" + "9" * 5000,
    "v5e:1x1",
    "nope:1",
    ":",
    "tp=8",
    "tp=" + "9" * 5000,
]
SIZES = ["4KiB", "0", "1", "100GB", "9" * 400 + "GB", "-4KiB", "4 KiB", "4TB", "1e400", "nan", "٣", "", "KiB", "1.5MB"]
PATHS = [".", "/", "/dev/null", "/dev/full", "/dev/zero", "loop", "missing", "missing/x.json", "x" * 300, "x/" * 3000]
PATHS += [
    "a\nb.json",
    "\udcff.json",
    "out.json",
    "out.png",
    "out.txt",
    "",
    "fifo",
    "binary",
    "text.json",
    "script.py",
    "~",
]
VALUES = {"number": NUMBERS, "name": NAMES, "size": SIZES, "path": PATHS}
OF_PROBLEM = "batch,width,layers,sequence,heads,ff,experts,top-k,capacity-factor"
OPTIONS = {
    "check": "name:implementation,strategy,mesh,dtype,optimizer,device,schedule,reshard,recompute,model "
    f"number:degree,steps,microbatches,chunks,timeout,{OF_PROBLEM} flag:json",
    "diff": "name:target,left-target,right-target,implementation,mesh,left-mesh,right-mesh,precision,fail-on,dtype,"
    f"schedule,reshard,recompute,spelling,model number:degree,nproc,step,microbatches,chunks,timeout,{OF_PROBLEM} "
    "path:picture flag:json",
    "lesson": f"name:mesh,target,reshard,recompute,dtype,model number:degree,microbatches,timeout,{OF_PROBLEM} "
    "path:output,picture flag:json",
    "hlo": "flag:json",
    "report": "path:output,results name:section,fail-on number:timeout flag:quick,full,fresh,verbose,json",
    "targets": "flag:json",
    "trace": "name:format,fail-on number:nproc,timeout,steps path:baseline "
    "flag:json,verify,strict,values,all,module,update-baseline",
    "compile": "name:target,mesh,fail-on path:baseline flag:json,update-baseline",
    "bench collectives": "name:op,implementation,device number:ranks,iterations,budget,timeout size:size,min,max "
    "path:output,picture flag:bare,json,resume,wire",
    "bench steps": "name:strategy,mesh,implementation,dtype,optimizer,device,schedule,reshard,recompute,model "
    f"number:ranks,iterations,rounds,microbatches,chunks,speed-batch,timeout,{OF_PROBLEM} "
    "path:output,picture flag:json,resume",
    "bench bubbles": "name:implementation,dtype,device,schedule,model number:stages,microbatches,chunks,iterations,"
    f"timeout,paced-seconds,{OF_PROBLEM} path:output,picture,trace flag:json,resume,paced",
}
ARGUMENTS = {
    "lesson": NAMES + list(ON_AXES),
    "diff": NAMES + list(ON_AXES) + PATHS,
    "hlo": PATHS,
    "report": PATHS,
    "trace": PATHS,
}


def option(command):
    """An option of a command with any value, a right one among them."""
    each = []
    for group in OPTIONS[command].split():
        kind, _, names = group.partition(":")
        for name in names.split(","):
            values = st.just([]) if kind == "flag" else st.sampled_from(VALUES[kind]).map(lambda v: [v])
            each.append(values.map(lambda value, name=name: [f"--{name}", *value]))
    return st.one_of(each)


@pytest.mark.parametrize("command", OPTIONS)
def test_no_options_of_any_command_give_a_traceback(command, nothing_starts, places, capsys):
    words = st.lists(st.sampled_from(ARGUMENTS.get(command, [""])), max_size=3 if command in ARGUMENTS else 0)
    lines = st.tuples(st.lists(option(command), max_size=4), words)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))  # type: ignore[arg-type]
    @given(lines)
    def tried(line):
        options, arguments = line
        say(
            [*command.split(), *sum(options, []), "--", *arguments],
            capsys,
            max(1, len(arguments)) if command == "hlo" else 1,
        )

    tried()


def test_every_option_of_every_command_is_tried():
    for command, known in OPTIONS.items():
        here = cli._command()
        for word in command.split():
            here = here.commands[word]
        named = {name for group in known.split() for name in group.partition(":")[2].split(",")}
        there = {one.lstrip("-") for p in here.params for one in [*p.opts, *p.secondary_opts] if one.startswith("--")}
        assert named == there - {"help"}, command


HUGE = {
    "check --width 100000000": "batch 128, width 100000000, 4 layers, float32 needs at least 3.2e+06 TB of memory",
    "check --model transformer --sequence 100000": "needs at least 51.2 TB of memory",
    "check --model transformer --strategy data_parallel --batch 1000000000": "needs",
    "diff sequence_parallel --model transformer --ff 100000000": "needs",
    "check --model transformer --experts 4 --sequence 9" + "0" * 4000: "needs at least 1e+18 TB of memory",
    "check --layers 1000000000 --width 1 --strategy data_parallel": "needs",
    "check --batch 1000000000000 --strategy data_parallel --implementation torch": "needs",
    "check --degree 1000 --batch 1000 --strategy data_parallel": "torch runs 250 ranks at most on one machine",
    "diff data_parallel --width 100000000": "needs",
    "diff data_parallel --width 9" + "0" * 4000: "needs at least 1e+18 TB of memory",
    "bench collectives --size 64GB --ranks 4": "the largest payload needs at least 768 GB of memory, but only 1 GB",
    "bench steps --width 100000000": "needs",
    "bench steps --ranks 300 --batch 300 --strategy data_parallel": "torch runs 250 ranks at most",
    "bench bubbles --width 100000000": "needs",
    "trace --nproc 1000000 script.py": "a script in 1000000 processes needs at least 20 TB of memory",
    "check --implementation annotated --degree 2000 --batch 2000 --strategy data_parallel": "jax runs 1024 ranks at",
}


@pytest.mark.parametrize(("line", "words"), HUGE.items(), ids=lambda text: text[:60])
def test_sizes_beyond_memory_are_refused_with_the_bytes_needed_and_there(
    line, words, nothing_starts, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    status, said = say(line.split(), capsys)
    assert status == 2 and words in said


@pytest.mark.parametrize(
    "line",
    [
        "check",
        "diff data_parallel --target v5p:8x8x16 --width 100000 --batch 2048",
        "diff fully_sharded --spelling naive",
        "bench steps",
        "bench collectives",
        "bench bubbles",
    ],
)
def test_what_fits_is_not_refused(line, nothing_starts, monkeypatch, capsys):
    monkeypatch.setattr(memory, "available", lambda: 4 * 10**9)
    monkeypatch.setattr(machine, "cores", lambda: 4)
    assert say(line.split(), capsys)[0] == 0


def test_what_is_there_is_what_a_container_leaves_in_either_version_of_cgroups(tmp_path):
    proc, v2 = tmp_path / "proc/self", tmp_path / "sys/fs/cgroup"
    v1 = v2 / "memory"
    for directory in (proc, v2 / "a/b", v1):
        directory.mkdir(parents=True)
    (proc / "cgroup").write_text("4:cpu,memory:/not/seen\n0::/a/b\n")
    assert list(memory.cgroup_rests(tmp_path)) == []
    files = {"memory.max": "max\n", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 100\n"}
    for group, limit in (("a/b", "max"), ("a", "1000"), ("", "")):
        for name, content in files.items():
            if group:
                (v2 / group / name).write_text(limit if name == "memory.max" else content)
    assert list(memory.cgroup_rests(tmp_path)) == [400]
    assert memory.available(tmp_path) == 400
    (v1 / "memory.limit_in_bytes").write_text("500")
    (v1 / "memory.usage_in_bytes").write_text("450")
    (v1 / "memory.stat").write_text("total_inactive_file 20\n")
    assert sorted(memory.cgroup_rests(tmp_path)) == [70, 400]
    (v1 / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert list(memory.cgroup_rests(tmp_path)) == [400]


def test_the_least_that_a_run_needs_is_less_than_what_the_closed_form_and_the_drawing_take():
    run = Run("torch", one_axis("data_parallel", 4), Problem(128, 1024, 4))
    assert memory_limit.full_model(run.problem) >= 4 * 8 * (1024**2 + 1024)
    assert memory_limit.of_run(run, 4) >= 4 * memory_limit.drawn(run.problem)
    assert memory_limit.of_run(run, 4, copies=3) == 4 * memory.PROCESS + 3 * memory_limit.held(run)
