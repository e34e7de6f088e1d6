"""`make gpu` from its options to its exit status, with parts that do nothing; and the parts' own processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.documents.gpu import Reached
from benchmarks.documents.results_io import parse_as, read_file
from benchmarks.gpu import __main__ as entry
from benchmarks.gpu import command, floors, parts, programs, proofs, run, sizes, suite, wheels
from contract.reference import run as reference_run
from shardiff.ranks import jax_devices, torch_pool
from shared_tests.bench import gpu_documents as made_up

FLOORS = made_up.document()["parts"][4]["reached"]
SMALL = replace(sizes.REHEARSAL, step=replace(sizes.REHEARSAL.step, width=16, batch=16, layers=2), payloads=(1024,))


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch):
    """What the part "floors" writes, and the status that it ends with; no other part is started."""
    found = {"content": FLOORS, "status": 0}

    def start(part, device, folder, log, temporary):
        assert (part.name, device) == ("floors", "cpu")
        code = (
            f"import sys; open(sys.argv[1], 'w').write({json.dumps(found['content'])!r}); sys.exit({found['status']})"
        )
        file = str(folder / f"{part.name}.json")
        return subprocess.Popen(
            [sys.executable, "-S", "-c", code, file], stdout=log, stderr=log, start_new_session=True
        )

    monkeypatch.setattr(run, "start", start)
    return found


ARGUMENTS = ["--device", "cpu", "--part", "floors", "--output"]


def test_a_part_alone_is_run_written_and_summarized(reached, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    assert entry.main([*ARGUMENTS, str(tmp_path / "new")]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("floors: done after ") and "This is a rehearsal on the CPU" in out
    assert f"{tmp_path}/new/gpu.json, gpu.md" in out
    document = read_file(tmp_path / "new" / "gpu.json")["gpu"]
    assert document["gpu"] == {} and not document["complete"]  # of the CPU no facts are asked
    assert "Floors" in (tmp_path / "new" / "gpu.md").read_text()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("content", "status", "expected"),
    [
        (FLOORS, 1, 3),
        ({"proofs": [made_up.proof(passed=False)]}, 0, 1),
        ({"proofs": [made_up.proof(passed=False)]}, 1, 1),
    ],
)
def test_what_is_not_equal_and_what_is_not_complete_have_a_status(reached, content, status, expected, tmp_path, capsys):
    reached |= {"content": content, "status": status}
    assert entry.main([*ARGUMENTS, str(tmp_path)]) == expected


def test_what_came_from_the_wheels_is_told_and_facts_that_fail_are_kept_as_an_error(
    reached, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(wheels, "install", lambda folder, target: ["msgspec"])
    monkeypatch.setattr(command, "FACTS", "raise OSError('the driver does not answer')")
    assert entry.main([*ARGUMENTS, str(tmp_path), "--wheels", "/some/wheels"]) == 0
    assert capsys.readouterr().err.startswith("from /some/wheels: msgspec\n")
    assert read_file(tmp_path / "gpu.json")["gpu"]["gpu"] == {"error": "OSError: the driver does not answer"}


def test_a_folder_that_cannot_be_written_is_refused(reached, capsys):
    assert entry.main([*ARGUMENTS, "/proc"]) == 2
    assert capsys.readouterr().err.startswith("shardiff: /proc: cannot be written: ")


def test_a_part_s_process_always_has_what_it_has_reached_in_its_file(monkeypatch, tmp_path):
    lines = ["a.py::test_one PASSED [ 50%]", "a.py::test_two FAILED [100%]"]
    monkeypatch.setattr(suite, "COMMAND", ("-S", "-c", f"print({chr(10).join(lines)!r})"))
    parts.run(parts.PARTS["tests"], "cpu", tmp_path / "tests.json")
    (tests,) = json.loads((tmp_path / "tests.json").read_text()).values()
    assert tests == {"passed": 1, "failed": 1, "skipped": 0, "failures": ["a.py::test_two"]}
    monkeypatch.setattr(suite, "COMMAND", ("-S", "-c", "raise SystemExit(4)"))
    with pytest.raises(RuntimeError, match="pytest ended with status 4; its output is above"):
        suite.on_gpu(sizes.REHEARSAL, lambda reached: None)


def test_wheels_are_fetched_for_every_python_in_the_versions_that_are_pinned(monkeypatch, tmp_path):
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    wheels.download(tmp_path / "new", ("3.12", "3.13"))
    pins = [line.lower().replace("_", "-") for line in (run.ROOT / "constraints.txt").read_text().splitlines()]
    for line, python in zip(commands, ("3.12", "3.13"), strict=True):
        assert line[line.index("--python-version") + 1] == python and "--no-deps" in line
        wanted = line[line.index("--dest") + 2 :]
        names = {name for name, others in wheels.NEEDED.items() for name in (name, *others)}
        assert {one.partition("==")[0] for one in wanted} == names
        assert all(one in pins for one in wanted if "==" in one)
        assert next(one for one in wanted if one.startswith("msgspec")) in pins
    assert (tmp_path / "new").is_dir()


def test_what_proves_alone_has_the_device_s_own_backend_and_what_shares_one_goes_through_the_host(monkeypatch):
    given: dict[str, tuple] = {}
    monkeypatch.setattr(
        proofs, "run_torch", lambda todo, device, staged, add: given.update({f"{staged}": (todo, device)})
    )
    monkeypatch.setattr(
        proofs, "run_jax", lambda todo, device, add: given.update({todo[0].implementation: (todo, device)})
    )
    for part in ("torch_alone", "torch_shared", "shard_map_alone", "annotated_alone"):
        getattr(proofs, parts.PARTS[part].where[1])(sizes.GPU, print)
    assert {device for _, device in given.values()} == {"cuda"}
    assert {one.world_size for one in given["False"][0]} == {1} and {one.world_size for one in given["True"][0]} == {
        1,
        2,
        4,
    }
    assert given["shard_map"][0][0].implementation == "shard_map" and given["annotated"][0]


def test_runs_of_jax_go_on_after_one_that_fails(monkeypatch):
    asked, told = [], []
    monkeypatch.setattr(jax_devices, "prepare", lambda count, device: asked.append((count, device)))
    from jax_impl import train

    todo = proofs.runs("annotated", sizes.alone(), replace(SMALL, dtypes=("float64",)))[:2]
    monkeypatch.setattr(train, "run", lambda one: reference_run(one) if one is todo[1] else {}["no such key"])
    proofs.run_jax(todo, "cuda", lambda one, got, seconds: told.append((one, got)))
    assert asked == [(1, "cuda")] and [one for one, _ in told] == todo
    assert told[0][1].rstrip().endswith("KeyError: 'no such key'")
    assert told[1][1].losses.tolist() == reference_run(todo[1]).losses.tolist()


def test_ranks_of_torch_are_started_once_for_the_runs_of_one_size_and_anew_after_a_failure(monkeypatch):
    started, calls = [], []

    @contextmanager
    def workers(*given):
        started.append(given)
        yield "pool"

    def until_failure(pool, todo, ranks, add):
        calls.append((ranks, len(todo)))
        return 1 if len(calls) == 1 else len(todo)

    monkeypatch.setattr(torch_pool, "workers", workers)
    monkeypatch.setattr(proofs, "until_failure", until_failure)
    todo = [one for one in proofs.runs("torch", sizes.shared(), sizes.REHEARSAL) if one.problem.dtype == "float32"]
    proofs.run_torch(todo, "cuda", True, lambda *_: None)
    count = {ranks: sum(one.world_size == ranks for one in todo) for ranks in (1, 2, 4)}
    assert started == [(4, "cuda", proofs.TIMEOUT, True)]
    assert calls == [(1, count[1]), (1, count[1] - 1), (2, count[2]), (4, count[4])]  # the first one has failed


def test_a_program_of_one_device_is_compiled_for_it_and_for_the_target(monkeypatch):
    monkeypatch.setattr(programs, "has_compiler", lambda kind: False)  # for which it would compile as long again
    monkeypatch.setattr(programs, "of_one", lambda: sizes.of_one()[:1])
    kept: list[dict] = []
    programs.one_device(SMALL, kept.append)
    (program,) = parse_as(Reached, kept[-1]).programs
    assert (program.target, program.strategy, program.differences) == ("cpu:1", "single_device", [])
    assert program.wire_bytes == [0, 0] and program.memory["argument"][0] == program.memory["argument"][1] > 0


def test_floors_of_one_framework_are_kept_where_the_other_fails(monkeypatch):
    kept: list[dict] = []

    def collectives(framework, given):
        if framework == "torch":
            raise proofs.WorkerError("rank 0 of 1 raised")
        return [floors.floor(framework, "all_reduce", 1024, 1e-6, 1024)]

    monkeypatch.setattr(floors, "copies", lambda given: iter([floors.floor("torch", "copy", 8, 1e-9, 16)]))
    monkeypatch.setattr(floors, "collectives", collectives)
    with pytest.raises(proofs.WorkerError, match="rank 0 of 1 raised"):
        floors.measure(SMALL, kept.append)
    assert [(row["framework"], row["op"]) for row in kept[-1]["floors"]] == [("torch", "copy"), ("jax", "all_reduce")]


def test_a_collective_of_one_rank_has_a_floor(monkeypatch):
    @contextmanager
    def workers(*given):
        assert given == ("torch", 1, "cpu", floors.TIMEOUT)
        yield Pool()

    class Pool:
        def call(self, function, payloads, iterations):
            assert function is floors.torch_collectives and payloads == (1024,)
            return [{"broadcast": [{"bytes": 1024, "amortized": [3e-6, 2e-6, 1e-6]}]}]

    monkeypatch.setattr(floors, "workers", workers)
    (row,) = floors.collectives("torch", SMALL)
    assert row["seconds"] == 2e-6 and row["bytes_per_second"] == pytest.approx(1024 / 2e-6)
