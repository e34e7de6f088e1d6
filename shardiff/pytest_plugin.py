"""Communication in tests: the fixture `communication`, whose baselines lie beside the test.

    def test_a_step_communicates_as_before(communication):
        communication.check(shardiff.read(jax.jit(step).lower(*args)))

`pytest --update-communication` writes the baselines, into `test_file.communication.json` beside `test_file.py`; commit
them with the code. From then on the test fails where the program communicates something else, with the diff as a table.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

OPTION = "--update-communication"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardiff", "what programs communicate")
    group.addoption(OPTION, action="store_true", help="Write the baselines of the fixture communication.")


class Communication:
    """Compares programs with the baselines of one test."""

    def __init__(self, file: Path, test: str, update: bool) -> None:
        self.file, self.test, self.update = file.with_suffix(".communication.json"), test, update

    def check(self, program: Any, name: str = "", allow: Collection[str] = (), **reading: Any) -> None:
        """Assert that the program communicates what its baseline does; with --update-communication, make it that.

        program: a shardiff.Program, or anything that shardiff.read takes, with its other arguments. name: tells the
        programs of one test apart. allow: rules of the diff that do not matter, such as "combined" and "moved".
        Raises AssertionError with the diff as a table, or where there is no baseline.
        """
        __tracebackhide__ = True
        from shardiff import baseline
        from shardiff.compiling.reading import read
        from shardiff.diff import diff
        from shardiff.program import Program

        found: Program = program if isinstance(program, Program) else read(program, **reading)
        key = f"{self.test} {name}".strip()
        if self.update:
            with locked(self.file.parent):
                baseline.update(self.file, {key: found})
            return
        kept = baseline.read(self.file) if self.file.exists() else {}
        if key not in kept:
            raise AssertionError(f"{self.file.name} has no baseline of {key}: write it with pytest {OPTION}")
        diff(replace(kept[key], label="the baseline"), found).assert_same(allow=allow)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone among the processes that write here: pytest-xdist runs tests of one file in several."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@pytest.fixture
def communication(request: pytest.FixtureRequest) -> Communication:
    """Compares what programs communicate with baselines beside the test; see shardiff.pytest_plugin."""
    test = request.node.nodeid.partition("::")[2]
    return Communication(request.node.path, test, bool(request.config.getoption(OPTION)))
