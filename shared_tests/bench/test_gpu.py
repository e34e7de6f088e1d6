"""`make gpu` without a GPU: parts that crash or hang, missing packages, the document, its page and its chapter."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest

from benchmarks.documents.gpu import Gpu
from benchmarks.documents.results_io import parse, parse_as, read_file
from benchmarks.gpu import __main__ as entry
from benchmarks.gpu import command, proofs, run, sizes, suite, wheels
from benchmarks.gpu.parts import PARTS, WAVES, Part
from benchmarks.report import compare, report, sections
from contract import reference
from contract.axes import ALL_USUAL, AXES_OF_BLOCKS, STRATEGIES
from shardiff.ranks.verdict import WorkerError
from shardiff.system.files import write
from shared_tests.bench import gpu_documents as made_up

FINE = "open(sys.argv[1], 'w').write('{\"floors\": []}')"
CASES = {
    "fine": FINE,
    "crashing": f"{FINE}; import os; print('its last words', flush=True); os.abort()",
    "raising": "raise ValueError('what went wrong')",
    "hanging": f"{FINE}; import time; time.sleep(60)",
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch):
    """Parts that do what CASES says, and the command that starts one."""
    waves = (tuple(Part(name, name, ("", ""), 3) for name in CASES), (Part("last", "last", ("", ""), 3),))

    def start(part, device, folder, log, temporary):
        code = f"import sys; {CASES.get(part.name, FINE)}"
        command = [sys.executable, "-S", "-c", code, str(folder / f"{part.name}.json")]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    monkeypatch.setattr(run, "WAVES", waves)
    monkeypatch.setattr(run, "start", start)


def test_a_part_that_crashes_or_hangs_takes_no_other_with_it(tmp_path, small_parts):
    document = run.measure(run.begin("cuda"), tmp_path, 60)
    parts = {part["name"]: part for part in document["parts"]}
    assert {name: part["status"] for name, part in parts.items()} == {
        "fine": "done",
        "crashing": "failed",
        "raising": "failed",
        "hanging": "out of time",
        "last": "done",
    }
    assert parts["crashing"]["reason"] == "it ended with signal 6, and crashing.log ends with: its last words"
    assert parts["raising"]["reason"].endswith("ValueError: what went wrong")
    assert parts["hanging"]["reached"] == {"floors": []}  # what it had written is kept
    assert not document["complete"]
    assert read_file(tmp_path / "gpu.json") == {"gpu": json.loads(json.dumps(document))}


def test_when_the_time_is_over_what_was_reached_stands_in_the_file(tmp_path, small_parts):
    document = run.measure(run.begin("cuda"), tmp_path, 2)
    assert [part["status"] for part in document["parts"]][-2:] == ["out of time", "not reached"]
    assert parse("gpu", json.loads((tmp_path / "gpu.json").read_text())).complete is False


def test_parts_are_ended_with_the_command(tmp_path, small_parts):
    started = run.run_wave([Part("hanging", "", ("", ""), 60)], "cuda", tmp_path, float("inf"))
    with pytest.raises(RuntimeError, match="interrupted"):
        started.throw(RuntimeError("interrupted"))


def test_every_part_has_its_function_and_together_they_fit_into_eight_minutes():
    for part in PARTS.values():
        module, function = part.where
        assert f"\ndef {function}(" in (run.ROOT / "benchmarks" / "gpu" / f"{module}.py").read_text()
    assert command.BUDGETS["cuda"] <= 470
    assert sum(max(part.seconds for part in wave) for wave in WAVES) <= 560  # most parts end before their limit


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command.machine, "num_gpus", lambda: 0)
    assert entry.main([]) == 2
    assert capsys.readouterr().err == (
        "shardiff: device cuda needs an NVIDIA GPU, and this machine has none; to rehearse: --device cpu\n"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--part", "nothing"], "unknown part 'nothing'; known: torch_alone, "),
        (["--budget", "0"], "budget must be a number of seconds, 1 to 86400, got 0"),
        (["--output", "/dev/null/folder"], "/dev/null/folder: Not a directory"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(options, said, capsys):
    assert entry.main(["--device", "cpu", *options]) == 2
    assert capsys.readouterr().err.startswith(f"shardiff: {said}")


def wheel(folder, name: str) -> None:
    """A wheel of one module, for any python."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


def test_a_missing_package_comes_from_the_folder_of_wheels(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "NEEDED", {"psutil": ("not-needed-then",), "shardiff_missing": ("msgspec",)})
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ValueError, match="has no shardiff_missing: run make wheels WHEELS=DIR"):
        wheels.install(None, tmp_path / "target")
    with pytest.raises(ValueError, match="is no folder of wheels"):
        wheels.install(tmp_path / "nowhere", tmp_path / "target")
    with pytest.raises(ValueError, match="cannot be installed from .*: ERROR: Could not find a version"):
        wheels.install(tmp_path, tmp_path / "target")
    wheel(tmp_path, "shardiff_missing")
    assert wheels.install(tmp_path, tmp_path / "target") == ["shardiff_missing"]
    assert [path.name for path in tmp_path.glob("target/*.py")] == ["shardiff_missing.py"]
    assert wheels.missing(["shardiff_missing"]) == []


def test_a_python_without_the_frameworks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "FRAMEWORKS", ("numpy", "no-such-framework"))
    with pytest.raises(ValueError, match="has no no-such-framework: give a python that has, as PYTHON="):
        wheels.install(None, tmp_path)


def test_what_needs_no_wheel_is_imported_before_them():
    code = "import sys; from benchmarks.gpu import __main__; print([m for m in ('msgspec', 'psutil', 'rich', 'typer') "
    code += "if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=run.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_pytests_lines_are_counted_as_they_come():
    lines = [
        "shared_tests/proof/test_a.py::test_it[float32-a b] PASSED [ 10%]\n",
        "shared_tests/proof/test_a.py::test_it[bfloat16] FAILED [ 20%]\n",
        "shared_tests/proof/test_b.py::test_other ERROR [ 30%]\n",
        "shared_tests/proof/test_b.py::test_third SKIPPED (no GPU) [ 40%]\n",
        "FAILED shared_tests/proof/test_a.py::test_it[bfloat16] - assert 1\n",
    ]
    counts = list(suite.counted(lines))
    assert len(counts) == 4
    assert (counts[-1]["passed"], counts[-1]["failed"], counts[-1]["skipped"]) == (1, 2, 1)
    assert counts[-1]["failures"] == [line.split()[0] for line in lines[1:3]]


class Pool:
    """Ranks that return the reference's results; the run at `fails` ends them."""

    def __init__(self, fails: int) -> None:
        self.fails, self.calls = fails, 0

    def call(self, function, todo, world_size, on_progress):
        assert function is proofs.train_each
        self.calls += 1
        for index, one in enumerate(todo):
            if self.calls == 1 and index == self.fails:
                raise WorkerError("rank 0 of 1 raised")
            for rank in reversed(range(world_size)):
                on_progress(rank, (index, (rank, reference.run(one))))


def test_a_run_that_fails_is_a_row_and_the_others_go_on(monkeypatch):
    from torch_impl import train

    def assemble(run, ranks):
        assert [rank for rank, _ in ranks] == list(range(run.world_size))
        return ranks[0][1]

    monkeypatch.setattr(train, "assemble", assemble)
    kept = []
    todo = [one for one in proofs.runs("torch", sizes.shared(), sizes.REHEARSAL) if one.world_size == 2][:3]
    add, pool = proofs.judge(kept.append), Pool(fails=1)
    done = proofs.until_failure(pool, todo, 2, add)
    assert done == 2
    assert proofs.until_failure(pool, todo[done:], 2, add) == 1
    rows = kept[-1]["proofs"]
    assert [row["strategy"] for row in rows] == [one.strategy for one in todo]
    assert rows[1]["failures"] == ["rank 0 of 1 raised"] and not rows[1]["passed"]
    assert [row["loss_error"] for row in rows] == [0, None, 0]  # the reference's own results


def test_bfloat16_without_its_single_device_run_is_no_proof():
    kept = []
    (run_, *_) = [
        one for one in proofs.runs("torch", sizes.alone(), sizes.REHEARSAL) if one.problem.dtype == "bfloat16"
    ]
    assert not run_.axes
    add = proofs.judge(kept.append)
    add(run_, "it failed", 1.0)
    add(replace(run_, axes=sizes.alone()[1]), reference.run(run_), 1.0)
    assert [row["passed"] for row in kept[-1]["proofs"]] == [False, False]
    assert "has failed" in kept[-1]["proofs"][1]["failures"][0]


def test_every_strategy_and_mesh_is_proven_alone_and_shared():
    alone, shared = sizes.alone(), sizes.shared()
    assert {axes[0].strategy for axes in alone if len(axes) == 1} == set(STRATEGIES)
    assert {(axes[0].strategy, axes[0].size) for axes in shared if len(axes) == 1} == {
        (strategy, ranks) for strategy in STRATEGIES for ranks in (2, 4)
    }
    blocks = sizes.alone_blocks(), sizes.shared_blocks()
    for found in blocks:
        assert {axes[0].strategy for axes in found if len(axes) == 1} >= set(AXES_OF_BLOCKS)
        assert {axis.name for axes in found for axis in axes} == set(ALL_USUAL)
    for name in ("torch", "shard_map", "annotated"):
        of_blocks = proofs.runs_of_blocks(name, blocks[0], sizes.GPU)
        alone_too = {run.problem for run in of_blocks if not run.axes}
        assert {run.problem for run in of_blocks} == alone_too, "bfloat16 is held to the single device's own error"
        missing = {"ring_attention"} if name == "annotated" else set()
        assert {strategy for run in of_blocks for strategy in run.strategies} >= set(AXES_OF_BLOCKS) - missing
        assert len(proofs.runs(name, alone, sizes.GPU)) == 3 * len(alone)
        rehearsed = proofs.runs(name, alone, sizes.REHEARSAL)
        assert {run.axes for run in rehearsed} == set(alone)
        assert {len(run.axes) for run in rehearsed if run.problem.dtype == "bfloat16"} == {0, 3}


def test_only_the_files_that_have_tests_of_a_gpu_are_collected():
    assert suite.files_with_the_mark() == [
        "shared_tests/proof/test_equivalence.py",
        "shared_tests/proof/test_staged.py",
    ]


def test_the_chapter_says_what_holds_and_what_was_not_reached():
    said = sections.summary(parse("gpu", made_up.document()))
    assert "6 of 8 parts were completed." in said
    assert "pytest -m gpu: 30 passed, 0 failed, 0 skipped." in said
    assert any("reaches 0.83 of the measured rate of matrix products" in line for line in said)
    assert "jax_steps: out of time: it was ended after 60 s." in said
    assert not any("rehearsal" in line for line in said)
    assert "rehearsal" in sections.summary(parse("gpu", made_up.document("cpu")))[0]


@pytest.mark.parametrize(("wrong", "holds"), [({}, True), ({"passed": False}, False), ({"failed_tests": 1}, False)])
def test_a_result_holds_if_every_run_is_equal_and_no_test_fails(wrong, holds):
    assert parse("gpu", made_up.document(**wrong)).holds == holds


def test_the_page_has_every_table():
    page = command.page(parse_as(Gpu, made_up.document(passed=False)))
    assert page.startswith("# shardiff: make gpu\n")
    for text in (
        "| transformer |",
        "Rates of the device",
        "| 780 |",
        "One rank of many",
        "| **DIFFERS** |",
        "h200:8x1",
        "Floors",
        "**out of",
    ):
        assert text in page, text


def test_a_report_shows_it_where_it_is_given_and_does_not_measure_it(tmp_path):
    write(tmp_path / "gpu.json", made_up.document())
    plan = report.plan(tmp_path / "out", [tmp_path / "gpu.json"], [], True, False)
    assert plan.sections[-1] == "gpu" and plan.given.keys() == {"gpu"}
    assert "gpu" not in report.plan(tmp_path / "out", [], [], True, False).sections
    made = report.gather(replace(plan, sections=("gpu",)))
    report.write_all(made, tmp_path / "out")
    assert "NVIDIA H200" in (tmp_path / "out" / "report.html").read_text()
    with pytest.raises(ValueError, match="the section gpu is what make gpu writes: give its file"):
        report.plan(tmp_path / "out", [], ["gpu"], True, False)


def test_two_results_are_compared():
    old, new = made_up.document(), made_up.document()
    new["parts"][3]["reached"]["steps"][0]["step_seconds"] = made_up.spread(0.03)
    rows = compare.compare({"gpu": parse("gpu", old)}, {"gpu": parse("gpu", new)})["rows"]
    flags = {row["figure"]: row["flag"] for row in rows}
    assert flags["torch eager: step"] == "slower"
    assert flags["torch eager transformer: step"] is None
    assert flags["annotated data_parallel: equal"] is None
