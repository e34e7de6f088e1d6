"""Speed and memory of the HLO reader: python -m benchmarks.speed.hlo_speed [MEGABYTES]

The file is made of the real dumps among the tests, renamed and repeated until it has the size, under one ENTRY that
calls every copy. Prints MB/s, best of 3, by the clock and by processor time (they differ where other programs run),
and the process's peak memory over the file's size, interpreter included.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardiff.hlo import read_file

DUMPS = Path(__file__).parents[2] / "shared_tests" / "tool" / "hlo_cases" / "real"


def synthetic(megabytes: float) -> str:
    """HLO text of that size: copies of the real dumps, one after the other."""
    modules = []
    for path in sorted(DUMPS.glob("*.hlo.txt")):
        text = path.read_text()
        modules.append(text[re.search(r"^(?:%|ENTRY)", text, re.M).start() :])  # type: ignore[union-attr]
    parts, size, calls = ["HloModule synthetic, num_partitions=8\n\n"], 0, []
    while size < megabytes * 1e6:
        number = len(calls)
        text = re.sub(r"%([\w.\-]+)", rf"%\1.c{number}", modules[number % len(modules)])
        entry = re.search(r"^ENTRY (%[\w.\-]+)", text, re.M)
        assert entry, "every dump has an ENTRY"
        calls.append(f"  %call.{number} = f32[] call(), to_apply={entry[1]}\n")
        parts.append(text.replace("\nENTRY ", "\n") + "\n")
        size += len(parts[-1])
    return "".join([*parts, "ENTRY %main () -> f32[] {\n", *calls, "}\n"])


def measure(path: str) -> None:
    """Print the reader's figures for one file; run in a process of its own, so that the peak is the reader's."""
    megabytes = Path(path).stat().st_size / 1e6
    seconds, processor, found = [], [], 0
    for _ in range(3):
        start, used = time.perf_counter(), time.process_time()
        found = len(read_file(path).records)
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    print(f"{megabytes:.0f} MB, {found} collectives")
    print(f"{megabytes / min(seconds):.0f} MB/s by the clock, {megabytes / min(processor):.0f} by processor time")
    print(f"peak memory {peak / megabytes:.2f} times the file")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--measure"]:
        measure(arguments[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "synthetic.hlo.txt"
            file.write_text(synthetic(float(arguments[0]) if arguments else 100))
            subprocess.run([sys.executable, "-m", "benchmarks.speed.hlo_speed", "--measure", str(file)], check=True)
