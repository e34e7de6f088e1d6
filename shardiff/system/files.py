"""Files that are complete at every moment: they are written beside their place, then moved there."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Document = dict[str, Any]


def write(path: Path, content: bytes | str | Document) -> None:
    """Replace a file in one step, by text, bytes, or a document as JSON. If it raises OSError, the old file stays."""
    target = Path(os.path.realpath(path))  # a link stays, and its target is replaced
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".shardiff-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(encoded(content))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def encoded(content: bytes | str | Document) -> bytes:
    """The bytes of the file."""
    if isinstance(content, dict):
        content = as_lines(content)
    return content.encode() if isinstance(content, str) else content


def as_lines(document: Document) -> str:
    """JSON with a line for each key, and for each element of a value that is a list, such as a timeline's events."""

    def value(of: Any) -> str:
        if isinstance(of, list) and of:
            return "[\n  " + ",\n  ".join(json.dumps(one, allow_nan=False) for one in of) + "\n ]"
        return json.dumps(of, allow_nan=False)

    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {value(of)}" for key, of in document.items()) + "\n}\n"


def unwritable(path: Path) -> str | None:
    """Why no file can be written there, found by writing one beside it; None if one can."""
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # refuses names that are too long
        with tempfile.NamedTemporaryFile(dir=Path(os.path.realpath(path)).parent, prefix=".shardiff-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def keeper(path: Path | None) -> Callable[[bytes | str | Document], bool]:
    """A function that writes content that must not be lost to `path`, and returns whether it could.

    Once `path` cannot be written (the disk is full), the content goes to the temporary directory instead, and one line
    on standard error says where; if that fails as well, the line says only that. Without a path nothing is written,
    and that counts as success.
    """
    places = [] if path is None else [path, Path(tempfile.gettempdir(), f"shardiff-{os.getpid()}-{path.name}")]

    def keep(content: bytes | str | Document) -> bool:
        while places:
            try:
                write(places[0], content)
                return places[0] == path
            except OSError as error:
                failed = places.pop(0)
                then = f"; writing to {places[0]} instead" if places else ""
                print(f"shardiff: {failed}: cannot be written: {error.strerror}{then}", file=sys.stderr)
        return path is None

    return keep


def check_path(name: str, path: Path | None, suffix: str) -> None:
    """Raises ValueError, in one line, unless a file of this name can be made."""
    if path is None:
        return
    if path.suffix != suffix or not os.path.isdir(path.parent) or (os.path.exists(path) and not os.path.isfile(path)):
        raise ValueError(f"the {name} must be a {suffix} file in an existing folder, got {str(path)!r}")
    if reason := unwritable(path):
        raise ValueError(f"the {name} {str(path)!r} cannot be written: {reason}")


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format that the file's name asks for."""
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    write(path, picture.getvalue())
