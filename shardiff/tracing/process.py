"""One process of a program that is traced: it runs as it would under `python script.py`, and every call is noted.

The program is run in the real `__main__`, with its own sys.argv and sys.path, and its globals live as long as the
interpreter. Each call is noted before it runs, so that nothing is lost when a process is killed or never returns: as a
line of this process's own file, or, if calls are to be verified, with the verifier. What the process starts by
multiprocessing is traced too: spawned processes come by here, forked ones inherit all of it.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardiff.system.network import LOOPBACK
from shardiff.system.processes import when_parent_ends
from shardiff.tracing.calls import Call, encoded
from shardiff.tracing.launches import follow
from shardiff.tracing.link import Link, StoppedError
from shardiff.tracing.sending import receive
from shardiff.tracing.settings import ROOT, Settings
from shardiff.tracing.stacks import answer
from shardiff.tracing.tracer import capture

PATIENCE = 10.0  # seconds in which to be ended
SETTLE = 0.02


def main(settings: str, before: Collection[str]) -> None:
    """Run the program. before: the modules that Python itself imports before any program."""
    given = Settings.from_text(settings)
    if given.fd >= 0:  # under torchrun the store is torchrun's; here rank 0 has it, until it ends
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=given.fd)
        atexit.register(lambda kept: None, store)  # the other ranks may need it as long as this process lives
    script = Path(given.target)
    here = str(Path.cwd()) if given.kind != "script" else str(script.resolve().parent)
    given = replace(given, fd=-1, port=os.environ.get("MASTER_PORT", ""), here=here)
    prepare(given, before)
    space = vars(sys.modules["__main__"])
    for name in [name for name in space if name not in ("__name__", "__builtins__")]:
        del space[name]
    space |= {"__doc__": None, "__package__": None, "__loader__": None, "__spec__": None, "__cached__": None}
    sys.argv[:] = ["-m" if given.kind == "module" else given.target, *given.arguments]
    if not sys.flags.safe_path and given.kind != "function":
        sys.path.insert(0, here)
    end = noted(given, None if given.followed else int(os.environ.get("RANK", 0)))
    try:
        run(given, space)
    except SystemExit as error:
        end(error.code in (None, 0))
        raise
    except BaseException as error:
        report(error, given)
        sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)
    end(True)


def run(given: Settings, space: dict[str, Any]) -> None:
    """The program itself, in this namespace, which is that of `__main__`."""
    if given.kind == "module":
        runpy._run_module_as_main(given.target)  # type: ignore[attr-defined]  # what `python -m` calls
    elif given.kind == "script":
        path = os.path.abspath(given.target)
        space |= {"__file__": path, "__loader__": importlib.machinery.SourceFileLoader("__main__", path)}
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), space)
    else:
        function, arguments = receive(Path(given.target).read_bytes())
        with own_group():
            function(*arguments)


def report(error: BaseException, given: Settings) -> None:
    """Show an error as Python would, from the program's own frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):  # of the program's own text, which has no frame
        frames = error.__traceback__
    if given.kind == "function":
        text = "".join(traceback.format_exception_only(error)).strip()
        with suppress(OSError):
            Path(given.directory, f"{os.environ.get('RANK', 0)}.error").write_text(text)
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def spawned(settings: str, code: str, before: Collection[str]) -> None:
    """Run the code that multiprocessing starts a spawned process with."""
    given = Settings.from_text(settings)
    prepare(given, before)
    end = noted(given, None)
    try:
        exec(code, {})
    except SystemExit as error:
        end(error.code in (None, 0))
        raise
    end(True)


def prepare(given: Settings, before: Collection[str]) -> None:
    """End with the process that started this one, follow those that this one starts, find the store, and leave the
    program's names to it."""
    if not given.followed:  # such a process may have been started by a thread that ends before it
        when_parent_ends(signal.SIGKILL)
    sys.path.remove(ROOT)
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    create_store = rendezvous._create_c10d_store

    def store_at(host: str, at: Any, *args: Any, **kwargs: Any) -> Store:
        """torch's, but where a script has chosen another port no one has made a store yet."""
        asked = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
        if asked and str(at) != given.port:
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        try:
            return create_store(host, at, *args, **kwargs)
        finally:
            if asked:
                os.environ["TORCHELASTIC_USE_AGENT_STORE"] = asked

    follow(given)
    rendezvous._create_c10d_store = store_at
    if given.kind != "function":
        forget_shadowed(given.here, before)


def forget_shadowed(here: str, before: Collection[str]) -> None:
    """Let the program import what lies in its own folder, though a module of that name was imported to get here."""
    finder = importlib.machinery.PathFinder()
    for name in {name.partition(".")[0] for name in sys.modules} - set(before) - {"__main__"}:
        spec = finder.find_spec(name, [here])
        origin = spec and spec.origin
        if origin and origin != getattr(sys.modules[name], "__file__", None):
            for each in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                del sys.modules[each]


@contextmanager
def own_group() -> Iterator[None]:
    """A process group for a function that makes none: with it, or until it makes its own."""
    make = dist.init_process_group

    def theirs(*args: Any, **kwargs: Any) -> None:
        dist.init_process_group = make
        dist.destroy_process_group()
        make(*args, **kwargs)

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(LOOPBACK, int(os.environ["MASTER_PORT"]), is_master=False)
    make(store=PrefixStore("shardiff", store), rank=rank, world_size=size)
    dist.init_process_group = theirs
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def noted(given: Settings, rank: int | None) -> Callable[[bool], None]:
    """Note or verify every call from now on to this process's end. rank: as which it was started, if as one.

    Returns what is to be told whether the program has ended well.
    """
    stack, ended = ExitStack(), [False]
    groups: dict[str, Any] = {}
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))  # for good: what would end a group waits for gloo's threads
    first: dict[str, Any] = {"first_phase": "other", "values": given.values, "groups": groups}
    if given.verifier:
        link = Link(given.verifier, given.directory, rank)
        stack.callback(lambda: link.end(ended[0]))
        stack.enter_context(capture(tell=or_end(link.tell), hold=or_end(link.hold), **first))
    else:
        stack.enter_context(capture(tell=writer(given.directory), **first))
    stack.callback(time.sleep, SETTLE)  # gloo's threads may have Python objects to free, which they cannot do later
    atexit.register(stack.close)  # the first to be registered is the last to run

    def end(well: bool) -> None:
        ended[0] = well

    return end


def or_end(do: Callable[[Any], None]) -> Callable[[Any], None]:
    """The same, but where the program must not go on it waits to be ended: an error here would hide the verifier's."""

    def done(what: Any) -> None:
        try:
            do(what)
        except StoppedError:
            time.sleep(PATIENCE)
            os._exit(1)

    return done


def writer(directory: str) -> Callable[[Call], None]:
    """A function that appends a call to this process's file."""
    files: dict[int, int] = {}

    def write(call: Call) -> None:
        pid = os.getpid()
        if pid not in files:
            answer(directory)
            path = Path(directory, f"{pid}.jsonl")
            files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(files[pid], encoded(call.to_json()))

    answer(directory)
    return write
