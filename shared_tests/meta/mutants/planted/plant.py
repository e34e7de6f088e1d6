"""How a mistake is planted: an edit in one module, and the one test that must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from shared_tests.edited import Edit

ASSERTS = ("AssertionError", "assert ", "Failed: DID NOT RAISE")


@dataclass(frozen=True)
class Planted:
    """name: what is wrong. edit: (old, new) in the source of `module`, old there once. test: file::function.

    words: how the failure's message starts.
    """

    part: str
    name: str
    module: str
    edit: Edit
    test: str
    words: tuple[str, ...] = ASSERTS

    @property
    def file(self) -> PurePath:
        """The module's path in the repository."""
        return PurePath(*self.module.split(".")).with_suffix(".py")


def plant(part: str, module: str, file: str, *mistakes: tuple[str, ...]) -> tuple[Planted, ...]:
    """Mistakes (name, old, new, test function, words if it is an error) of one module whose tests are in one file."""
    return tuple(
        Planted(part, name, module, (old, new), f"shared_tests/{file}.py::{test}", tuple(words) or ASSERTS)
        for name, old, new, test, *words in mistakes
    )
