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
from contract.strategy import Run, RunResult
from shardiff.ranks import jax_devices as devices
from shardiff.ranks.supervisor import Workers
from shardiff.ranks.torch_pool import workers
from shardiff.system.machine import num_gpus
from shared_tests.meta import leftovers
from shared_tests.quick import quick_compilation, quickly

settings.register_profile("repeatable", derandomize=True, deadline=None, report_multiple_bugs=False)
settings.register_profile("unshrunk", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("repeatable")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch shares the GPU, where there is one
devices.prepare(8, "auto")  # before anything uses jax
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell's background; what tests interrupt inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)

Execute = Callable[[Run], RunResult]


@pytest.fixture(scope="session")
def pool() -> Iterator[Workers]:
    """Worker processes on the CPU for calls of up to 8 ranks."""
    with workers(8, "cpu", timeout=60) as started:
        yield started


@pytest.fixture(scope="session")
def execute(pool: Workers) -> Execute:
    """Runs any implementation. The same run is computed once, and its result must not be changed.

    Runs that differ in the number of steps alone share one compiled step.
    """
    from jax_impl import train as jax_train
    from torch_impl import train as torch_train

    results: dict[Run, RunResult] = {}
    steps: dict[Any, Any] = {}
    compile_step = jax_train.compile_step

    def compile_once(mesh: Any, run: Run, *rest: Any) -> Any:
        key = mesh, replace(run, steps=1)
        if key not in steps:
            steps[key] = quickly(compile_step(mesh, run, *rest))
        return steps[key]

    def result(run: Run) -> RunResult:
        if run not in results:
            with quick_compilation(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax_train, "compile_step", compile_once)
                results[run] = torch_train.run(run, pool) if run.implementation == "torch" else jax_train.run(run)
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


# The groups that take longest, as measured: pytest-xdist begins with them, so that no worker ends with one alone.
LONGEST = (
    "test_equivalence-pipeline_parallel",
    "test_mutants",
    "test_faults",
    "test_fuzz",
    "test_bad_options",
    "test_bad_outputs",
    "test_equivalence-data_parallel",
    "test_trace_script",
    "test_verify",
    "test_diff",
    "test_equivalence-tensor_parallel",
    "test_equivalence-megatron_tensor_parallel",
    "test_targets",
    "test_launch",
    "test_bench_collectives",
    "test_bench_steps",
    "test_bench_bubbles",
    "test_cli",
    "test_torchrun",
    "test_launch_scripts",
    "test_jax_launch",
    "test_trace",
)


def pytest_configure(config: pytest.Config) -> None:
    """The session fails if it leaves a process, a port, shared memory or a temporary file behind."""
    config.pluginmanager.register(leftovers)
    config.option.loadscopereorder = False  # pytest-xdist's, by number of tests, which says little here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none. A GPU that a framework cannot use is no reason to skip."""
    if num_gpus() == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="this machine has no NVIDIA GPU"))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(group(item.nodeid), len(LONGEST)))


def group(nodeid: str) -> str:
    """A file's tests are a group, but for those of equivalence, which are one for each strategy."""
    name, _, case = nodeid.partition("::")
    if (stem := Path(name).stem) != "test_equivalence":
        return stem
    strategy = re.search(r"single_device|(data|(megatron_)?tensor|pipeline)_parallel", case.partition("[")[2])
    return f"{stem}-{strategy[0] if strategy else 'pipeline_parallel'}"


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
