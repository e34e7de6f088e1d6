"""`make traces`: plain scripts of DDP, FSDP2 and DTensor, traced 50 times. None may hang, say or end otherwise.

Each is run without a trace first. A trace must end within LIMIT seconds with the script's own status, and its ranks
must print what they printed before, to the last bit of the loss. Half of the traces are with --verify, a third with
PYTHONWARNINGS=error. Scripts run at module level and inside a function, and end with status 0 or another one. The
result is `traced_often.md` beside this file.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardiff.system import files
from shardiff.system.machine import version

LIMIT = 120.0  # seconds
BEGIN = """
import sys
import torch, torch.distributed as dist
from torch import nn
"""
MODEL = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
"""
TRAIN = """
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
for step in range(5):
    torch.manual_seed(step)
    loss = net(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"result {dist.get_rank()} {loss.item().hex()}\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""
MODELS = {
    "ddp": f"""
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo"){MODEL}net = DistributedDataParallel(net)""",
    "fsdp2": f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,)){MODEL}for i in (0, 2):
    fully_shard(net[i], mesh=mesh)
fully_shard(net, mesh=mesh)""",
    "dtensor": f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
plan = {{"0": ColwiseParallel(), "2": RowwiseParallel()}}
mesh = init_device_mesh("cpu", (2,)){MODEL}parallelize_module(net, mesh, plan)
""",
}


def script(name: str, in_main: bool) -> str:
    """A training script, at module level or inside a function. Its argument is its exit status."""
    body = f"{MODELS[name]}{TRAIN}"
    if in_main:
        body = "def main():\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "main()\n"
    return f"{BEGIN}{body}sys.exit(int(sys.argv[1]))\n"


@dataclass(frozen=True)
class Trial:
    """One trace. warnings: Python's own option for them."""

    name: str
    in_main: bool
    status: int
    verify: bool
    warnings: str

    def __str__(self) -> str:
        place = "in a function" if self.in_main else "at module level"
        more = [*(["--verify"] if self.verify else []), *(["PYTHONWARNINGS=error"] if self.warnings else [])]
        return ", ".join([f"{self.name} {place}", f"status {self.status}", *more])


def trials(count: int) -> Iterator[Trial]:
    """So many, the scripts in turn."""
    names = list(MODELS)
    for i in range(count):
        yield Trial(
            names[i % 3],
            i // 3 % 2 == 1,
            5 if i % 5 == 4 else 0,
            i // 6 % 2 == 1,
            "error" if i % 3 == i // 9 % 3 else "",
        )


def ended(command: list[str], directory: Path, warnings: str = "") -> tuple[int | None, Counter[str], str]:
    """Exit status (None if it did not end), the lines of results, and all that was written."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": warnings}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=directory, env=environment, start_new_session=True, **pipe) as process:  # type: ignore[call-overload]
        try:
            out, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # shardiff ends its ranks, and shows what it has
            out, _ = process.communicate()
            return None, Counter(), out
    return process.returncode, Counter(line for line in out.splitlines() if line.startswith("result ")), out


def flaw(trial: Trial, directory: Path, expected: Counter[str]) -> str | None:
    """What is not as without a trace."""
    name = f"{trial.name}_{'main' if trial.in_main else 'module'}.py"
    options = ["--nproc", "2", *(["--verify"] if trial.verify else []), name, str(trial.status)]
    status, results, out = ended([sys.executable, "-m", "shardiff", "trace", *options], directory, trial.warnings)
    if status is None:
        return f"has not ended within {LIMIT:g} s"
    if status != trial.status:
        return f"ended with status {status}: {' | '.join(out.splitlines()[-3:])}"
    return None if results == expected else f"printed {dict(results)} where it prints {dict(expected)}"


def untraced(name: str, directory: Path) -> Counter[str]:
    """What a script prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", name, "0"]
    status, results, out = ended(command, directory)
    assert status == 0 and len(results) == 2, out
    return results


def run(count: int, at_once: int = 2) -> Iterator[tuple[Trial, str | None]]:
    """The trials with what is wrong with each."""
    with tempfile.TemporaryDirectory(prefix="shardiff-") as folder, ThreadPoolExecutor(at_once) as executor:
        directory, expected = Path(folder), {}
        for name in MODELS:
            for in_main in (False, True):
                files.write(directory / f"{name}_{'main' if in_main else 'module'}.py", script(name, in_main))
            expected[name] = untraced(f"{name}_module.py", directory)
        todo = list(trials(count))
        yield from zip(todo, executor.map(lambda t: flaw(t, directory, expected[t.name]), todo), strict=True)


def report(results: list[tuple[Trial, str | None]], seconds: float) -> str:
    """Markdown."""
    wrong = [(trial, said) for trial, said in results if said]
    lines = [
        "# Plain scripts, traced often",
        "",
        f"{len(wrong)} of {len(results)} traces hang or change the script's output or status. On 2 ranks each, with",
        f"torch {version('torch')} and Python {sys.version.split()[0]}, in {seconds / 60:.0f} minutes; `make traces`",
        "does it again.",
        "",
        "| script | traces | with --verify | with PYTHONWARNINGS=error | with another status than 0 | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for in_main in (False, True):
            mine = [(trial, said) for trial, said in results if (trial.name, trial.in_main) == (name, in_main)]
            sums = [
                sum(map(bool, column))
                for column in zip(*((t.verify, t.warnings, t.status, w) for t, w in mine), strict=True)
            ]
            cells = [f"{name}, {'in a function' if in_main else 'at module level'}", len(mine), *sums]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", *(f"- {trial}: {said}" for trial, said in wrong)] if wrong else []
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shared_tests.tool.traced_often", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    options = parser.parse_args()
    start, results = time.monotonic(), []
    for trial, said in run(options.count):
        results.append((trial, said))
        print(f"{len(results)} of {options.count}: {trial}: {said or 'as without a trace'}", flush=True)
    files.write(options.output, report(results, time.monotonic() - start))
    return int(any(said for _, said in results))


if __name__ == "__main__":
    sys.exit(main())
