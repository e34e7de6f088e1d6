"""No file gives a traceback: it is read, or one line says what is wrong with it. Nothing that is read is run."""

from __future__ import annotations

import ast
import gzip
import json
import threading
from pathlib import Path

import pytest

from benchmarks.documents import results_io
from shardiff.system import inputs
from shared_tests.bench.report_documents import everything
from shared_tests.tool import fuzz
from shared_tests.tool.answers import CASE, ROOT, say

# Files


NO_FILES = {
    "missing": "no such file",
    ".": "Is a directory",
    "loop": "Too many levels of symbolic links",
    "x" * 300: "File name too long",
    "fifo": "a pipe to which no process has written",
    "/dev/zero": "an endless device",
}


ANY_SIDE = {".": "no *after_optimizations.txt in this folder", "loop": "no such file"}  # what diff says of a side


@pytest.mark.parametrize(("path", "words"), NO_FILES.items(), ids=lambda text: text[:20])
def test_what_is_no_file_is_told_and_nothing_hangs(path, words, places, capsys):
    for line in (["hlo", path], ["diff", path, path], ["report", "--results", path]):
        if path != "." or line[0] != "report":
            status, said = say(line, capsys)
            told = ANY_SIDE.get(path, words) if line[0] == "diff" else words
            assert status == 2 and told in said, line


def test_a_pipe_that_somebody_writes_to_is_read(places, capsys):
    writer = threading.Thread(target=lambda: Path("fifo").write_bytes(CASE.read_bytes()))
    writer.start()
    assert inputs.read_bytes("fifo", 30) == CASE.read_bytes()
    writer.join()


def test_what_memory_cannot_hold_is_not_read(places, monkeypatch, capsys):
    Path("bomb.gz").write_bytes(gzip.compress(b"HloModule m\n" + bytes(2_000_000), 9))
    Path("large").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(inputs, "address_space", lambda: 4_000_000)
    status, said = say(["hlo", "large"], capsys)
    assert status == 2 and "2 MB need 8 MB of memory, but only 4 MB is available" in said
    status, said = say(["hlo", "bomb.gz"], capsys)
    assert status == 2 and "the gzip file holds more than 1,000,000 bytes" in said


JSON = {
    "[" * 100_000: "nested too deeply",
    '{"records": [], "records": []}': "an object has the same key twice",
    '{"records": [NaN]}': "NaN is not a number",
    '{"records": [1e400]}': "1e400 is too large for a float",
    '{"records": [' + "9" * 5000 + "]}": "not JSON",
    '{"records": ["\\ud800"]}': "surrogates not allowed",
    "\x00": "not JSON",
    "": "not JSON",
    "[]": "has no records",
    '{"records": [[]]}': "a record has at least",
    '{"records": [{"op": "all_reduce", "dtype": "f32", "payload_bytes": 1'
    + "0" * 400
    + ', "wire_bytes": 0}]}': "2**63",
}


@pytest.mark.parametrize(("text", "words"), JSON.items(), ids=range(len(JSON)))
def test_json_that_others_would_read_differently_is_refused(text, words, places, capsys):
    Path("a.json").write_text(text)
    status, said = say(["diff", "a.json", "a.json"], capsys)
    assert status == 2 and words in said
    status, said = say(["report", "a.json", "a.json"], capsys)
    assert status == 2


def test_a_result_is_read_in_any_encoding_of_unicode_and_with_names_that_look_like_markup(places, capsys):
    document = everything()["check"]
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        Path("a.json").write_text(json.dumps(document), encoding=encoding)
        assert say(["report", "a.json", "a.json"], capsys)[0] == 0
    record = {"op": "all_reduce", "dtype": "[/]", "payload_bytes": 8, "wire_bytes": 8, "group_size": 2}
    Path("[bold].json").write_text(json.dumps({"program": "[/x]", "records": [{**record, "source": "[/y]:1"}]}))
    assert say(["diff", "[bold].json", "[bold].json"], capsys)[0] == 0


# What no table, picture or comparison reads: it follows from the rest, or nobody asks for it.
UNREAD = ("schema", "max_difference", "grad_norm_error", "label")
DERIVED = ("totals", "implementation_totals", "unexplained", "extra_bytes")


def test_every_field_of_a_result_has_a_type_that_is_checked():
    for section, document in everything().items():
        document = json.loads(json.dumps(document))
        for container, key in list(fuzz.places(document)):
            of = {"bytes": "verdict", "mesh": "label", "memory": "traced"}.get(key)  # only in objects with this key
            if key in DERIVED or (of is not None and of in container):
                del container[key]
        results_io.parse(section, document)
        for container, key in list(fuzz.places(document)):
            right = container[key]
            container[key] = {"a": {}} if not isinstance(right, dict) else [0]
            try:
                results_io.parse(section, document)
                assert key in UNREAD or (key == "bytes" and "memory_copy_GBps" in container), (section, key)
            except ValueError as error:
                assert "\n" not in str(error) and len(str(error)) < 400
            container[key] = right


# Nothing read is run


ALLOWED = {  # the few places that run or unpickle, and whose bytes those are
    ("shardiff/ranks/rank.py", "pickle.load"),  # the caller's job, from a nameless file of its own
    ("shardiff/ranks/messages.py", "pickle.loads"),  # between a caller and its own ranks, over socket pairs
    ("shardiff/tracing/sending.py", "pickle.load"),  # the caller's own function, sent to its own ranks
    ("shardiff/tracing/sending.py", "marshal.loads"),  # the code of one that has no name to import it by
    ("shardiff/tracing/process.py", "runpy.run_path"),  # the user's own script, which is what was asked for
    ("shardiff/tracing/process.py", "exec"),  # what that script starts with python -c
}
FORBIDDEN = {
    "eval",
    "exec",
    "pickle.load",
    "pickle.loads",
    "yaml.load",
    "marshal.loads",
    "torch.load",
    "np.load",
}
FORBIDDEN |= {"runpy.run_path", "dill.loads", "shelve.open", "ast.literal_eval", "os.system"}


def test_nothing_that_is_read_is_unpickled_or_evaluated():
    found = set()
    for package in ("shardiff", "contract", "torch_impl", "jax_impl", "benchmarks"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in FORBIDDEN:
                    found.add((str(file.relative_to(ROOT)), name))
                if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
                    assert ast.unparse(node.value) != "True", file
    assert found <= ALLOWED, found - ALLOWED
