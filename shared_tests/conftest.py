"""What the tests share: worker processes, JAX devices, and the results of runs, each computed once.

An implementation that cannot be loaded makes its tests errors; only `-m gpu` tests may skip, for want of a GPU.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from contract import reference
from contract.axes import AXES
from contract.strategy import Run, RunResult
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import workers
from shardiff.ranks.verdict import WorkerError
from shardiff.system.machine import cores, num_gpus
from shared_tests import quick
from shared_tests.meta import leftovers

settings.register_profile("repeatable", derandomize=True, deadline=None, report_multiple_bugs=False)
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU, where there is one
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background; what tests interrupt inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)

Execute = Callable[[Run], RunResult]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces everything after a command's validation by a function that prints a word and returns status 0."""
    from benchmarks import commands
    from benchmarks import diff as diff_command
    from benchmarks.bubbles import command as bubbles_command
    from benchmarks.collectives import command as collectives_command
    from benchmarks.report import command as report_command
    from benchmarks.steps import command as steps_command
    from shardiff.cli import trace as trace_script

    def started(*_: Any, **__: Any) -> int:
        print("started")
        return 0

    for module in (collectives_command, steps_command, bubbles_command, report_command):
        monkeypatch.setattr(module, "answer", started)
    monkeypatch.setattr(collectives_command, "answer_wire", started)
    monkeypatch.setattr(commands, "answer_check", started)
    monkeypatch.setattr(diff_command, "answer_diff", started)
    monkeypatch.setattr(trace_script, "show", started)


@pytest.fixture(scope="session")
def pool() -> Iterator[Workers]:
    """Worker processes on the CPU for calls of up to 8 ranks."""
    from shared_tests.on_ranks import nothing

    with workers(8, "cpu", timeout=60) as started:
        started.call(nothing, world_size=1)
        yield started


@pytest.fixture(scope="session")
def expected(request: pytest.FixtureRequest) -> dict[Run, list[Run]]:
    """Run of a test's parameter `run` -> all torch runs that tests of its group take, on as many ranks."""
    groups: dict[Any, dict[Run, None]] = {}
    for item in request.session.items:
        run = item.callspec.params.get("run") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else 0
        if isinstance(run, Run) and run.implementation == "torch" and not item.get_closest_marker("gpu"):
            groups.setdefault((group(item.nodeid), run.world_size), {})[run] = None
    return {run: list(runs) for runs in groups.values() for run in runs}


@pytest.fixture(scope="session")
def execute(pool: Workers, expected: dict[Run, list[Run]]) -> Execute:
    """Runs any implementation. The same run is computed once, and its result must not be changed.

    Runs that differ in the number of steps alone share one compiled step. Torch runs of a group are made in one call.
    """
    from jax_impl import train as jax_train
    from shared_tests.on_ranks import every
    from torch_impl import train as torch_train

    results: dict[Run, RunResult] = {}
    on_ranks: dict[Run, list[torch_train.RankResult]] = {}
    steps: dict[Any, Any] = {}

    def in_torch(run: Run) -> RunResult:
        if run not in on_ranks:
            together = [run, *(other for other in expected.get(run, ()) if other not in on_ranks and other != run)]
            try:
                ranks = pool.call(every, torch_train.train, [(one,) for one in together], world_size=run.world_size)
            except WorkerError:
                return torch_train.run(run, pool)  # one of them fails; if it is this one, it says so itself
            on_ranks.update(zip(together, map(list, zip(*ranks, strict=True)), strict=True))
        return torch_train.assemble(run, on_ranks[run])

    compile_step = jax_train.compile_step

    def compile_once(mesh: Any, run: Run, *rest: Any) -> Any:
        key = mesh, replace(run, steps=1)
        if key not in steps:
            steps[key] = compile_step(mesh, run, *rest)
        return steps[key]

    def result(run: Run) -> RunResult:
        if run not in results:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax_train, "compile_step", compile_once)
                results[run] = in_torch(run) if run.implementation == "torch" else jax_train.run(run)
        return results[run]

    return result


@pytest.fixture(scope="session")
def reference_of() -> Execute:
    """The reference's result of a run; computed once for all strategies, implementations, degrees and dtypes."""
    results: dict[Run, RunResult] = {}

    def result(run: Run) -> RunResult:
        key = replace(run.on_one_device, implementation="torch")
        key = replace(key, problem=replace(run.problem, dtype="float64"))
        if key not in results:
            results[key] = reference.run(key)
        return results[key]

    return result


@pytest.fixture(scope="session")
def execute_on_gpu() -> Iterator[Execute]:
    """Runs any implementation on one GPU."""
    from jax_impl import train as jax_train
    from torch_impl import train as torch_train

    results: dict[Run, RunResult] = {}
    with workers(1, "cuda", timeout=120) as started:

        def result(run: Run) -> RunResult:
            if run not in results:
                results[run] = torch_train.run(run, started) if run.implementation == "torch" else jax_train.run(run)
            return results[run]

        yield result


# The files that take longest, as measured: pytest-xdist begins with them, so that no worker ends with one alone.
LONGEST = (
    "test_faults",
    "test_composition",
    "test_transformer",
    "test_diff",
    "test_trace_script",
    "test_equivalence",
    "test_mutants",
    "test_attention",
    "test_targets",
    "test_launch",
    "test_cli",
    "test_trace",
    "test_packaging",
    "test_trace_api",
    "test_torchrun",
    "test_launch_scripts",
    "test_collectives",
    "test_compile",
    "test_bench_collectives",
    "test_bench_steps",
    "test_interrupt",
    "test_jax_launch",
    "test_verify",
    "test_sides",
    "test_api",
    "test_gpu_calls",
    "test_report",
    "test_staged",
    "test_bench_bubbles",
)


def pytest_configure(config: pytest.Config) -> None:
    """The session fails if it leaves a process, a port, shared memory or a temporary file behind."""
    config.pluginmanager.register(leftovers)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # not where workers run the tests
        quick.prepare(8)  # before anything uses jax
    config.option.loadscopereorder = False  # pytest-xdist's, by number of tests, which says little here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none. A GPU that a framework cannot use is no reason to skip."""
    if num_gpus() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="this machine has no NVIDIA GPU"))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(group(item.nodeid).partition("-")[0], len(LONGEST)))


def group(nodeid: str) -> str:
    """A file's tests are a group, but for those of equivalence, which are one for each strategy."""
    name, _, case = nodeid.partition("::")
    if (stem := Path(name).stem) != "test_equivalence":
        return stem
    strategy = re.search("|".join(AXES), case.partition("[")[2])
    return f"{stem}-{strategy[0] if strategy else 'pipeline_parallel'}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One worker more than cores, because many tests wait for processes."""
    return cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that look at the same results go to the same process.

    pytest-xdist's own way, the mark xdist_group, is without effect since pytest 9.2, whose node ids it cannot change.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Groups(config, log)
