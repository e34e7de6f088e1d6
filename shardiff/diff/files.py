"""Programs that `shardiff trace` and `shardiff hlo` have written as JSON."""

from __future__ import annotations

from pathlib import Path

from shardiff.mesh import Mesh
from shardiff.program import Program
from shardiff.system.inputs import NotJson, read_json


def read_program(path: Path, mesh: Mesh | None = None) -> Program:
    """The program in an output of `shardiff trace`, `compile` or `hlo` with --json, labelled by the file's name.

    mesh: its ranks on named axes, where the caller knows them better.

    Raises ValueError, one line that names the file, for anything else.
    """
    try:
        data = read_json(path)
    except NotJson as error:
        raise ValueError(f"{error}; give the JSON of one program, as shardiff trace or hlo print with --json") from None
    if not isinstance(data, dict) or not isinstance(data.get("records"), list):
        raise ValueError(f"{path}: has no records; give an output of shardiff trace or hlo --json")
    try:
        program = Program.from_json(data)
        return Program(program.records, path.name, mesh or program.mesh, program.memory, program.segments)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
