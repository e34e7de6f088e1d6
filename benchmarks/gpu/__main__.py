"""`make gpu`: everything that needs a GPU, in one command; on the CPU, a rehearsal of it.

    python -m benchmarks.gpu [--device cpu] [--output DIR] [--wheels DIR] [--budget SECONDS] [--part NAME ...]

Exit status: 0 if every part was completed and everything compared is equal, 1 if something is not equal or a test
fails, 2 for a wrong input, 3 if a part could not be completed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import wheels


def main(given: list[str] | None = None) -> int:
    """The command; its exit status."""
    options = parser().parse_args(given)
    with tempfile.TemporaryDirectory(prefix="shardiff-", ignore_cleanup_errors=True) as installed:
        try:
            added = wheels.install(options.wheels, Path(installed))
            from benchmarks.gpu.command import answer  # what it imports may have come from the wheels

            return answer(options, added)
        except ValueError as error:
            print(f"shardiff: {error}", file=sys.stderr)
            return 2


def parser() -> argparse.ArgumentParser:
    """The options. argparse, because typer may be among what is missing."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses it at small sizes")
    made.add_argument("--output", type=Path, default=Path("gpu"), metavar="DIR", help="folder for the results")
    made.add_argument("--wheels", type=Path, metavar="DIR", help="folder of wheels of packages that may be missing")
    made.add_argument("--budget", type=float, metavar="SECONDS", help="for all parts; default 465, on the CPU 1400")
    made.add_argument("--part", action="append", default=[], metavar="NAME", help="run only this part; repeatable")
    return made


if __name__ == "__main__":
    sys.exit(main())
