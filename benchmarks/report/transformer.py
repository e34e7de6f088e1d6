"""docs/transformer_steps.md, made from the results that it shows: `python -m benchmarks.report.transformer`.

With the word `commands` behind it, it prints what measures them.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from benchmarks.bubbles import view as bubbles
from benchmarks.documents import kept
from benchmarks.documents.results_io import Section, parse, read_file
from benchmarks.documents.steps import Ratio, Row, Steps
from benchmarks.experts import view as experts
from benchmarks.report.blocks import Cell, Table, from_rich
from benchmarks.report.markdown import markdown, plain
from benchmarks.report.sections import caption
from benchmarks.steps import picture, view
from benchmarks.steps.numbers import PEERS
from shardiff.system.files import write

PAGE, PICTURE = (kept.ROOT / "docs" / name for name in ("transformer_steps.md", "transformer_steps.png"))
SIZES = "--model transformer --batch 4 --sequence 64 --width 512 --layers 4"
COMMANDS = {  # what measures each result, and the results' names
    "steps": f"bench steps {SIZES} --implementation torch --implementation peer --iterations 12 --rounds 2 "
    "--speed-batch 512",
    "programs": f"bench steps {SIZES} --ranks 2 --implementation shard_map --implementation annotated --iterations 8 "
    "--rounds 2 --speed-batch 512",
    "recompute": f"bench steps {SIZES} --ranks 2 --strategy single_device --strategy sequence_parallel "
    "--strategy fully_sharded --implementation torch --implementation shard_map --recompute none --recompute block "
    "--recompute selective --recompute offload --iterations 8 --rounds 2 --speed-batch 512",
    "experts": f"bench experts {SIZES} --experts 8 --ranks 2 --iterations 6",
    "bubbles": "bench bubbles --model transformer --batch 32 --sequence 32 --width 256 --layers 8 --stages 2 "
    "--stages 4 --microbatches 4 --schedule gpipe --schedule 1f1b --schedule zb_h1 --implementation torch --paced "
    "--paced-seconds 0.1 --iterations 2",
}
NAMES = {
    "modules": "torch modules",
    "ddp": "DistributedDataParallel",
    "fsdp2": "FSDP2, a unit for every block",
    "ddp_zero": "DistributedDataParallel, ZeroRedundancyOptimizer",
    "dtensor": "DTensor parallelize_module",
    "pipelining": "torch.distributed.pipelining",
    "ddp_ring": "_templated_ring_attention (private), DistributedDataParallel",
    "all_to_all": "all_to_all_single_autograd of the tokens that there are",
}
INTRO = """The same transformer is trained with every strategy, ours and the library equivalent in turn, step by step,
in the same processes. Before anything is timed, one step of each shows that their gradients are equal. Every table has
its sizes and its machine below it, and the commands are at the end of this page, which is made from their results; a
test compares it with them."""
STEPS = """A ratio is that of adjacent iterations, and a time is the median of the slowest rank. Strategies of the MLP
are described in [benchmarks.md](benchmarks.md); sequence_parallel, context_parallel, ring_attention, ulysses and
expert_parallel split what only a transformer has. For context_parallel and ulysses torch has no library equivalent. No
annotation derives a ring, so ring_attention has no annotated program."""
RECOMPUTE = """Over the same step that keeps everything for its backward pass. block runs a block again from its input
(`torch.utils.checkpoint`, `jax.checkpoint`), and selective only attention, from q, k and v on. offload computes
nothing again: `torch.autograd.graph.save_on_cpu` moves all that autograd keeps to the host's memory, which on a CPU is
a copy. "predicted" is the ratio
of the operations of all matrix products. "formula" is what autograd keeps over the closed form; of XLA the temporaries
are shown, for which there is none. "wire" is the closed form of what a rank must send, and "compiled" what XLA's
program sends."""
EXPERTS = """The routers prefer some experts. Ours gives every expert as many slots as the most popular one needs, so
that nothing is dropped, and all experts compute on as many. all_to_all sends the tokens that there are, and waits for
the rank that has most of them."""
BUBBLES = """The stages are blocks, each on a paced device ([torch_impl/paced.py](../torch_impl/paced.py)), so that
stages that share a core do not disturb each other. The closed form takes forward pass and both gradients as equally
long. Attention's products of queries, keys and values have no gradient of a weight, so that less can be put off than
that, and "weighted", which replays the schedule with the measured durations, is larger than the closed form."""


def page(results: dict[str, Any], files: dict[str, str] | None = None) -> str:
    """The page. results: by the names of COMMANDS. files: where they are, from the checkout's root; the newest ones."""
    steps, programs, recompute, imbalance, of_bubbles = (results[name] for name in COMMANDS)
    parts = ["# Steps of a transformer", wrapped(INTRO), "## Every strategy", wrapped(STEPS)]
    parts += [markdown(table(together(steps, programs))), *map(wrapped, sentences(steps))]
    parts += [origin(steps, view.setting(steps)), f"JAX: {origin(programs, view.setting(programs))}"]
    parts += ["![Step times of every strategy, by contestant](transformer_steps.png)"]
    parts += ["## Recompute or store", wrapped(RECOMPUTE), markdown(from_rich(view.recompute_table(recompute)))]
    parts += [origin(recompute, view.setting(recompute))]
    parts += ["## Popular experts", wrapped(EXPERTS), markdown(from_rich(experts.table(imbalance)))]
    parts += [wrapped(f"{plain(line)}.") for line in experts.notes(imbalance)] + [origin(imbalance)]
    parts += ["## The bubble of a pipeline of blocks", wrapped(BUBBLES), markdown(from_rich(bubbles.table(of_bubbles)))]
    parts += [origin(of_bubbles, f"{of_bubbles.settings}, {of_bubbles.settings.iterations} steps")]
    commands = lines(files or {name: latest(name) for name in COMMANDS})
    return "\n\n".join([*parts, "## Commands", "\n".join(["```sh", *commands, "```"])]) + "\n"


def together(steps: Steps, programs: Steps) -> Steps:
    """Both results as one, strategy by strategy."""
    keys = list(dict.fromkeys((row.ranks, *row.key) for row in (*steps.rows, *programs.rows)))
    rows = sorted((*steps.rows, *programs.rows), key=lambda row: keys.index((row.ranks, *row.key)))
    return replace(steps, rows=sorted(rows, key=lambda row: row.ranks), ratios=[*steps.ratios, *programs.ratios])


def table(result: Steps) -> Table:
    """Each strategy on each number of ranks: ours over the library equivalent, and the programs of JAX."""
    rows = {(row.key, row.implementation): row for row in result.rows if row.recompute == "none"}
    ratios = {(ratio.key, ratio.of, ratio.to): ratio for ratio in result.ratios}
    cells = []
    for key in dict.fromkeys(row.key for row in result.rows):
        of = {name: rows.get((key, name)) for name in ("torch", "shard_map", "annotated")}
        peer = next((name for name in PEERS.get(key[0], ()) if (key, name) in rows), None)
        theirs, ratio = (rows[key, peer], ratios.get((key, "torch", peer))) if peer else (None, None)
        shown = f"{NAMES[peer]} {milliseconds(theirs)}" if peer else "-"
        texts = [key[0], key[1], milliseconds(of["torch"]), shown, share(ratio)]
        cells.append(
            [Cell(text) for text in (*texts, *(milliseconds(of[name]) for name in ("shard_map", "annotated")))]
        )
    columns = ["strategy", "ranks", "torch, explicit", "library equivalent", "explicit / equivalent (quartiles)"]
    return Table([*columns, "shard_map", "annotated"], [False, True, True, False, True, True, True], cells)


def milliseconds(row: Row | None) -> str:
    """The median of a contestant's step."""
    return f"{1e3 * row.step_seconds.median:.1f} ms" if row else "-"


def share(ratio: Ratio | None) -> str:
    """A ratio with its quartiles."""
    return f"{ratio.ratio.median:.2f} ({ratio.ratio.q1:.2f} to {ratio.ratio.q3:.2f})" if ratio else "-"


def sentences(result: Steps) -> Iterator[str]:
    """What the table says."""
    over = [r for r in result.ratios if r.of == "torch" and r.to in PEERS.get(r.strategy, ())]
    slower = [f"{plain(r.strategy)} on {r.on} ({r.ratio.median:.2f})" for r in over if r.ratio.median > 1]
    yield (
        f"Ours takes at most as long as its library equivalent in {len(over) - len(slower)} of {len(over)} medians"
        + (f"; it takes longer in {', '.join(slower)}." if slower else ".")
    )
    proven = [row.gradient_difference for row in result.rows if row.gradient_difference]
    if proven:
        yield f"The gradients of all contestants of a strategy agree to within {max(proven):.1e}, in float32."
    if worst := [row.experts for row in result.rows if row.experts]:
        yield f"The blocks of expert_parallel have {worst[0]} experts in place of each MLP, so its steps do other work."
    yield from (f"{plain(line)}." for line in view.left_out(result))


def origin(result: Any, setting: str = "") -> str:
    """Sizes, machine, versions, commit and date of a result."""
    return wrapped("; ".join(filter(None, (plain(setting), plain(caption(result))))) + ".")


def wrapped(text: str) -> str:
    """A paragraph in lines of 120 columns."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def lines(files: dict[str, str]) -> list[str]:
    """The commands that measure everything and then make the page."""
    measuring = [f".venv/bin/shardiff {line} --output {files[name]}" for name, line in COMMANDS.items()]
    return [*measuring, ".venv/bin/python -m benchmarks.report.transformer"]


def latest(name: str) -> str:
    """The newest file of a result, from the checkout's root."""
    if (found := kept.newest(f"transformer_{name}")) is None:
        raise FileNotFoundError(f"no results of transformer_{name} in benchmarks/results")
    return str(found.relative_to(kept.ROOT))


def of_today() -> dict[str, str]:
    """The files of results that are measured today."""
    return {name: kept.of_today(f"transformer_{name}") for name in COMMANDS}


def results() -> dict[str, Section]:
    """Name -> the result in its file."""
    documents = {name: read_file(kept.ROOT / latest(name)) for name in COMMANDS}
    return {name: parse(*next(iter(each.items()))) for name, each in documents.items()}


def main() -> None:
    """Write the page and its picture."""
    found: dict[str, Any] = results()
    write(PAGE, page(found))
    picture.picture(together(found["steps"], found["programs"]), PICTURE)


if __name__ == "__main__":
    print("\n".join(lines(of_today()))) if sys.argv[1:] == ["commands"] else main()
