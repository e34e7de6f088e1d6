"""What the README shows is true: its excerpts are source code, its commands work, its links lead somewhere.

A block or a command of a kind that no test here can check is a failure, so that nothing goes unchecked silently.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import commands as lesson
from shardiff.cli import main as cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```([^\n]*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
LINKS = re.findall(r"\]\(([^)\s]+)\)", TEXT) + re.findall(r'href="([^"]+)"', TEXT)
SIDES = [f"{side}/tensor_parallel.py" for side in ("torch_impl/explicit", "jax_impl/shard_map", "jax_impl/annotated")]
KINDS = {
    "python": "a program, which is run",
    "py": "an excerpt of a source file",
    "sh": "commands",
    "console": "commands, each after a dollar sign, and what they print",
    "": "what a program has printed",
    "text": "what a program has printed",
}


def blocks(*kinds: str) -> list[str]:
    return [body for kind, body in BLOCKS if kind in kinds]


def statements(code: str) -> list[str]:
    """The statements of an excerpt as Python prints them, without comments and original line breaks."""
    wrapped = "def excerpt():\n" + "".join(f"    {line}\n" for line in code.splitlines())
    return [ast.unparse(node) for node in ast.parse(wrapped).body[0].body]  # type: ignore[attr-defined]


def test_every_block_is_of_a_known_kind():
    assert [kind for kind, _ in BLOCKS if kind not in KINDS] == []


def test_programs_run():
    for code in blocks("python"):
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{code}\n{done.stderr}"


@pytest.mark.parametrize(("place", "path"), list(enumerate(SIDES)), ids=SIDES)
def test_the_excerpts_side_by_side_are_the_source_s(place, path):
    excerpt = blocks("py")[place]
    assert TEXT.index(f'href="{path}"') < TEXT.index(excerpt)
    nodes = [ast.unparse(n) for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.stmt)]
    for statement in statements(excerpt):
        assert statement in nodes, f"{path} has no such statement:\n{statement}"


def test_every_other_excerpt_is_in_a_file_that_the_readme_links():
    sources = [
        {ast.unparse(n) for n in ast.walk(ast.parse((ROOT / link).read_text())) if isinstance(n, ast.stmt)}
        for link in LINKS
        if link.endswith(".py")
    ]
    for excerpt in blocks("py")[len(SIDES) :]:
        assert any(source.issuperset(statements(excerpt)) for source in sources), excerpt


def test_links_into_the_repository_lead_somewhere():
    inside = [link for link in LINKS if "://" not in link and not link.startswith("#")]
    assert inside and [link for link in inside if not (ROOT / link).exists()] == []


def commands() -> list[str]:
    lines = [line for body in blocks("sh") for line in body.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for body in blocks("console") for line in body.splitlines() if line.startswith("$ ")]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_a_command_works(line, monkeypatch, capsys):
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun":
        words = words[[word.endswith("shardiff") for word in words].index(True) :]
    match words:
        case [program, *arguments] if Path(program).name == "shardiff":
            assert_understood(arguments, monkeypatch, capsys)
        case ["make", *targets]:
            for target in targets:
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
        case ["diff", one, other]:
            assert (ROOT / one).is_file() and (ROOT / other).is_file()
        case ["python" | "python3" | ".venv/bin/python", "-m", module, *_]:
            assert importlib.util.find_spec(module), module
        case ["pip", "install", *arguments]:
            extras = {
                name for word in arguments for found in re.findall(r"\[(.*)\]", word) for name in found.split(",")
            }
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extras <= known.keys()
        case _:
            pytest.fail(f"no test knows how to check {words[0]!r}")


def assert_understood(arguments, monkeypatch, capsys):
    """The command exists and has these options. `check` accepts their values, or refuses them as the README shows."""
    command = arguments[: 2 if arguments[0] == "bench" else 1]
    assert cli.main([*command, "--help"]) == 0
    described = capsys.readouterr().out
    for word in arguments[1:]:
        if word.startswith("-"):
            assert word.partition("=")[0] in described, word
    if arguments[:1] == ["check"]:
        planned = []
        monkeypatch.setattr(lesson, "answer_check", lambda runs, *rest: planned.extend(runs) or 0)
        status = cli.main(arguments)
        refusal = capsys.readouterr().err
        assert (status, bool(planned), refusal) == (0, True, "") or refusal in TEXT, refusal


def test_what_a_console_block_shows_of_a_refusal_is_what_is_printed(capsys):
    for body in blocks("console"):
        for line, shown in re.findall(r"^\$ shardiff (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE):
            if shown.startswith("shardiff: "):
                assert cli.main(shlex.split(line, comments=True)) == 2
                assert capsys.readouterr().err == shown
