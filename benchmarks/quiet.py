"""Keep C++ libraries' chatter off the user's screen."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back what is written to file descriptor 2, and show it only if the block raises.

    For a moment only: the whole process is affected, and so is a process started meanwhile. Loading JAX's CUDA plugin
    where there is no CUDA logs lines that no variable and no level turns off.
    """
    try:
        screen = os.dup(2)
    except OSError:  # closed: nothing can be shown
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            held.seek(0)
            os.write(screen, held.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)
