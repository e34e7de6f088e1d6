"""`shardiff plan`: what it prints, its JSON, its refusals, and that it answers at once."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from benchmarks.plan import plan as planning
from contract.planner import search
from contract.planner.search import Asked
from contract.problem import Problem
from shardiff import devices
from shardiff.cli import main as cli

SMALL = ["plan", "--devices", "h100:2x4", "--batch", "512", "--width", "1024", "--layers", "4"]


def test_the_table_names_the_fastest_mesh_what_it_waits_for_and_the_crossovers(capsys):
    assert cli.main(SMALL) == 0
    out = capsys.readouterr().out
    assert "h100:2x4: 781.3 TFLOP/s in bfloat16" in out and "fastest" in out and "waits" in out
    assert "over the rate of the links between hosts" in out and "over the batch" in out
    assert "links between hosts twice as fast:" in out and "sources: datasheet of the H100 SXM" in out


def test_json_has_a_schema_and_the_same_meshes_in_order(capsys):
    assert cli.main([*SMALL, "--json", "--top", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["schema"], len(document["meshes"])) == ("plan", 1, 3)
    seconds = [one["seconds"] for one in document["meshes"]]
    assert seconds == sorted(seconds)
    for one in document["meshes"]:
        parts = one["compute"] + sum(one["exposed"].values()) + one["bubble"] + one["update"] + one["overhead"]
        assert parts == pytest.approx(one["seconds"])
        assert one["memory_bytes"] == sum(one["memory"].values())
    for name in ("links", "batch"):
        assert isinstance(document["crossovers"][name], list)


def test_the_arithmetic_of_a_mesh_is_shown_term_by_term(capsys):
    assert cli.main([*SMALL, "--explain", "dp=2,tp=4"]) == 0
    out = capsys.readouterr().out
    assert "2 b F G = 0.1342 GFLOP" in out  # 2 * 256 * 1024 * 256
    assert "tp: 3 x all_reduce of 524 kB on 4 ranks inside a host: 3/2 S" in out
    assert "7 accesses x" in out and "simulated event by event" in out and "source: " in out


def test_a_picture_is_drawn(tmp_path, capsys):
    path = tmp_path / "plan.png"
    few = ["--mesh", "dp=8", "--mesh", "tp=8", "--no-crossovers"]
    assert cli.main([*SMALL, *few, "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "flaw"),
    [
        (["--devices", "h100"], "needs a size"),
        (["--mesh", "dp=3"], "the mesh dp=3 has 3 ranks, and there are 4 x 8 devices"),
        (["--mesh", "xp=32"], "unknown axis 'xp'"),
        (["--between", "fast"], "a rate is a number and a unit"),
        (["--dtype", "float16"], "unknown dtype 'float16'"),
        (["--devices", "v5e:8", "--dtype", "float64"], "v5e has no rate for float64"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--strategy", "zero9"], "unknown strategy 'zero9'"),
        (["--devices", "nowhere.json"], "no such file"),
        (["--links", "nowhere.json"], "no such file"),
    ],
)
def test_a_wrong_input_gets_one_line(options, flaw, capsys):
    assert cli.main(["plan", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("shardiff: ") and flaw in err and err.count("\n") == 1


def test_measured_collectives_are_a_link_profile(tmp_path):
    path = tmp_path / "links.json"
    fits = [
        {"implementation": "torch", "op": op, "ranks": 2, "mode": "per_iteration", "alpha_s": 1e-4, "beta_GBps": 2.0,
         "bus_beta_GBps": bus, "relative_error": 0.1}
        for op, bus in (("all_reduce", 2.0), ("reduce_scatter", 1.0))
    ]  # fmt: skip
    facts = {"os": "", "cpu": "one", "cores": 2, "memory_bytes": 1, "gpus": [], "python": "3", "commit": None,
             "versions": {"torch": None, "jax": None}, "date": ""}  # fmt: skip
    settings = {"ranks": [2], "iterations": 1, "budget": 1.0, "transport": "gloo", "device": "cpu",
                "threads_per_rank": {"2": 1}}  # fmt: skip
    document = {"kind": "collectives", "machine": facts, "method": [], "settings": settings, "floor": None,
                "rows": [], "fits": fits, "identities": [], "flat": None}  # fmt: skip
    path.write_text(json.dumps(document))
    machine = planning.machine_of("h100:2", path)
    network = machine.network
    assert network.inside.bandwidth == 2e9
    assert network.measured["reduce_scatter", 2].overhead == 2 and network.measured["all_reduce", 2].latency == 1e-4
    assert "measured on one" in machine.links_source


def test_what_xla_derives_is_priced_beside_the_closed_form(capsys):
    few = ["--mesh", "dp=2,tp=4", "--target", "h100:2x4", "--no-crossovers"]
    assert cli.main([*SMALL, *few, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["compiled"]
    ours, derived = one["closed_form"], one["compiled"]
    assert derived["flops"] == ours["flops"] == 11 * 2 * 256 * 1024 * 256
    assert derived["wire_bytes"] == ours["wire_bytes"]  # XLA derives Megatron's collectives
    assert derived["seconds_without_overlap"] < ours["seconds_without_overlap"]  # and combines those of the gradients


def test_every_mesh_of_a_thousand_devices_is_ranked_with_few_simulations(monkeypatch):
    """On an idle core this takes less than 2 s; what is counted here does not depend on who else is on the machine."""
    counts = Counter()

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        monkeypatch.setattr(search, name, call)

    counted("predict", search.predict)
    counted("stage_of", search.stage_of)
    machine, asked = devices.parse("h100:128x8"), Asked(Problem(65536, 16384, 64, "bfloat16"))
    began = time.process_time()
    found = search.rank(machine, asked)
    assert time.process_time() - began < 6
    assert counts["predict"] <= 20 and counts["stage_of"] <= 300
    assert found.best and found.num_meshes > 3000
    assert max(len(one.run.axes) for one in found.best) == 4
