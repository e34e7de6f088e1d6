"""Mutations of JSON documents, and the input of each number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from shared_tests.tool.fuzz.seeds import json_seeds
from shared_tests.tool.fuzz.text import blow_up, delete, duplicate, flip, insert, make_hlo, nest, truncate

VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 1, 10**18, 10**400, -(10**30), 1.5, 1e308, -1e308, 5e-324, "", "x")
VALUES += ("[/]", "[bold]", "a\nb", "\0", "\x1b[2J", "<script>", "é", "٣", "0", "nan", [], {}, [[]], [None], {"": None})
VALUES += ([1, 2], [[0, 1], [2, 3]], {"min": 2, "max": None}, {"min": 10**18, "max": 10**18}, "all_reduce", "forward")


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key or index) of a document."""
    todo = [node]
    while todo:
        here = todo.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], dict | list):
                todo.append(here[key])


def make_json(rng: random.Random) -> tuple[str, bytes]:
    """(mutation, input): a document with other values, without some or with more of them, or its text mutated."""
    which = rng.choice(("records", "results"))
    document = json.loads(json.dumps(rng.choice(json_seeds()[which])))
    name = rng.choice(("value", "value", "value", "key", "repeat", "deep", "text"))
    for _ in range(rng.choice((1, 1, 2, 5))):
        # First a kind of place, or a document's few settings would be lost among its many samples.
        by_name: dict[str, list[tuple[Any, Any]]] = {}
        for container, key in places(document):
            by_name.setdefault(str(key), []).append((container, key))
        if not by_name:
            break
        container, key = rng.choice(by_name[rng.choice(list(by_name))])
        if name == "value":
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif name == "key" and isinstance(container, dict):
            value = container.pop(key)
            if rng.random() < 0.5:
                container[rng.choice(("", "kind", "schema", str(key) + " ", "[/]"))] = value
        elif name == "key":
            del container[key]
        elif name == "repeat" and isinstance(container, list):
            container += [copy.deepcopy(container[key]) for _ in range(rng.choice((1, 3, 100)))]
        elif name == "deep":
            for _ in range(rng.choice((1, 2, 50))):
                container[key] = rng.choice(([container[key]], {"x": container[key]}))
    text = json.dumps(document).encode()
    if name == "text":
        number = rng.random()
        chosen = rng.choice((flip, delete, duplicate, truncate, blow_up, insert, nest))
        text = (
            text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig"))) if number < 0.1 else chosen(rng, text)
        )
        if 0.1 < number < 0.15:
            text = b"[" * 100_000 + text + b"]" * 100_000
    return f"{which}: {name}", text


MAKERS = {"hlo": make_hlo, "json": make_json}


def make(kind: str, seed: int, number: int) -> tuple[str, bytes]:
    """(mutation, input) of this number."""
    return MAKERS[kind](random.Random(f"{seed} {kind} {number}"))
