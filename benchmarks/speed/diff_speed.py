"""Speed of the diff: python -m benchmarks.speed.diff_speed

Times `shardiff diff` as a command, start-up, tracing and compiling included: the four strategies on five targets (two
commands), and data_parallel on a slice of 1,024 chips.
"""

from __future__ import annotations

import subprocess
import sys
import time

TARGETS = ("cpu:8", "h100:8", "h200:2x8", "v5e:2x4", "tpu7x:2x2x1")
LAYERS = {  # the default model's, but 16 stages need 16
    ("data_parallel", "tensor_parallel", "megatron_tensor_parallel"): "4",
    ("pipeline_parallel",): "16",
}


def seconds(*arguments: str) -> float:
    """The wall time of one `shardiff diff`. Raises CalledProcessError if it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "shardiff", "diff", *arguments, "--json", "--fail-on", "unexplained"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print both figures beside what they should not pass."""
    five = [word for target in TARGETS for word in ("--target", target)]
    taken = sum(seconds(*names, *five, "--batch", "256", "--layers", layers) for names, layers in LAYERS.items())
    print(f"four strategies on {', '.join(TARGETS)}: {taken:.1f} s (goal: 30)")
    taken = seconds("data_parallel", "--target", "v5p:8x8x16", "--batch", "1024")
    print(f"data_parallel on v5p:8x8x16, 1,024 chips: {taken:.1f} s (goal: 10)")


if __name__ == "__main__":
    main()
