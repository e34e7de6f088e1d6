"""A command's answer, or the one line that says why there is none."""

from __future__ import annotations

from pathlib import Path

from shardiff.cli import main as cli

CASE = Path(__file__).with_name("hlo_cases") / "conditional_branches.hlo.txt"
ROOT = Path(__file__).parents[2]


def say(arguments, capsys, files=1):
    """The status and all output of a command, which must answer, or say why not in one line (or one a file)."""
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    if status == 2:
        assert 1 <= err.count("\n") <= files, err
        assert all(line.startswith("shardiff: ") and len(line) > 20 for line in err.splitlines()), err
    else:
        assert status in (0, 1) and err == "" and out, (status, err)
    return status, out + err
