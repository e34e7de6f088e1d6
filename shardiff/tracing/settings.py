"""What a process of a traced program is told when it starts. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

STARTED = ".started"  # of a file with a line for each process that a traced one has started and that is not traced
ROOT = str(Path(__file__).parents[2])
# How a process of Python gets to `shardiff.tracing.process`: it imports nothing that the program's folder has, and no
# warning of what it imports is shown or becomes an error.
START = f"""import sys; before = set(sys.modules); sys.path.insert(0, {ROOT!r})
if sys.path[1:2] == [""]: del sys.path[1]
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from shardiff.tracing import process
"""


@dataclass(frozen=True)
class Settings:
    """directory: for files. verifier: its address, or "". values: note the values of results and parameters too.

    kind: what the target is: a "script", a "module", or the file of a pickled "function". fd: a listening socket for
    the store, or -1. port: the store's. here: the folder from which the program imports. followed: it was not started
    by us, but by a program that is traced.
    """

    directory: str
    verifier: str
    values: bool
    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    fd: int = -1
    port: str = ""
    here: str = ""
    followed: bool = False

    @property
    def script(self) -> Path:
        """Where the script lies, for any process, wherever it has changed to; `here` is the folder of its file."""
        return Path(self.here, Path(self.target).name).resolve()

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Settings:
        """Inverse of `to_text`."""
        fields = json.loads(text)
        return Settings(**fields | {"arguments": tuple(fields["arguments"])})


def command(settings: Settings) -> str:
    """The code that runs a program in a process of its own, which is told this."""
    return f"{START}process.main({settings.to_text()!r}, before)"


def spawn_command(settings: Settings, code: str) -> str:
    """The code that does in a spawned process what multiprocessing wants there, traced."""
    return f"{START}process.spawned({settings.to_text()!r}, {code!r}, before)"
