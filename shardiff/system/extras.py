"""What is installed only where it is asked for, and the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "flax": "jax", "optax": "jax", "matplotlib": "lesson"}


class MissingExtra(ModuleNotFoundError):
    """A package that the caller asked for in effect is not installed. The message is one line with the pip command."""


def require(what: str, *packages: str) -> None:
    """Raises MissingExtra unless these packages are installed. what: the command or function that needs them."""
    for package in packages:
        if not installed(package):
            raise missing(what, package)


def missing(what: str, package: str) -> MissingExtra:
    """The error of a command or function that needs a package of one of the extras."""
    extra = EXTRAS[package]
    return MissingExtra(
        f'{what} needs {package}, which is not installed: pip install "shardiff[{extra}]"', name=package
    )


def installed(package: str) -> bool:
    """Whether the package can be imported. Imports nothing."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False
