"""The options of every command that trains something: an MLP or a transformer, and its sizes.

A size that is not given has a default that depends on the model. What the model does not have is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from shardiff.cli.answers import one_of, refuse

if TYPE_CHECKING:
    from contract.problem import Problem

MODELS = ("mlp", "transformer")
OF_EXPERTS = ("top_k", "capacity_factor")
OF_BLOCKS = ("sequence", "heads", "ff", "experts", *OF_EXPERTS)


def size(metavar: str, text: str) -> Any:
    """An option that is shown with the others of the problem."""
    return typer.Option(metavar=metavar, help=text, rich_help_panel="What is trained")


def problem_of(
    model: Annotated[str, size("NAME", "mlp or transformer.")] = "mlp",
    batch: Annotated[int | None, size("N", "Samples in a step, over all ranks. Default: 128; transformer: 8.")] = None,
    width: Annotated[int | None, size("N", "Width of every layer. Default: 1024; transformer: 128.")] = None,
    layers: Annotated[int | None, size("N", "Number of layers; transformer: of blocks. Default: 4.")] = None,
    sequence: Annotated[int | None, size("N", "Transformer: tokens of a sample. Default: 32.")] = None,
    heads: Annotated[int | None, size("N", "Transformer: heads of attention. Default: 8.")] = None,
    ff: Annotated[int | None, size("N", "Transformer: width inside an MLP. Default: 4 times the width.")] = None,
    experts: Annotated[
        int | None,
        size("N", "Transformer: experts in place of each MLP. Default: none; 8 where expert_parallel splits them."),
    ] = None,
    top_k: Annotated[int | None, size("N", "Experts that a token goes to. Default: 2.")] = None,
    capacity_factor: Annotated[
        float | None,
        size("X", "Tokens that an expert takes at most, over those that it would have if all had as many. Default: 1."),
    ] = None,
) -> Problem:
    """The problem that the options describe. Raises ValueError, one line, for sizes that the model does not have."""
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "model" and value is not None}
    from contract.problem import Problem
    from contract.transformer import Transformer

    one_of("model", model, MODELS)
    if model == "mlp":
        if extra := [name for name in OF_BLOCKS if name in given]:
            raise ValueError(f"{typed(extra[0])} is for a transformer: give --model transformer, or leave it out")
        return Problem(**given)
    if experts is None and (extra := [name for name in OF_EXPERTS if name in given]):
        raise ValueError(f"{typed(extra[0])} is for experts: give --experts too, or leave it out")
    if experts is not None and experts < 1:
        raise ValueError(f"experts must be at least 1, got {experts}; without --experts, every block has an MLP")
    return Transformer(**{"ff": 4 * given.get("width", Transformer.width), **given})


def typed(name: str) -> str:
    """A size as it is typed: --top-k."""
    return f"--{name.replace('_', '-')}"


def takes_problem(
    command: Callable[..., None], of_mlp: Mapping[str, int] = MappingProxyType({})
) -> Callable[..., None]:
    """A command with the options of `problem_of`, whose result it gets as its parameter `problem`.

    of_mlp: the command's own defaults of the MLP's sizes.
    """
    options = parameters(problem_of)
    own = parameters(command)
    del own["problem"]

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        asked = {name: given.pop(name) for name in options}
        if asked["model"] == "mlp":
            asked |= {name: default for name, default in of_mlp.items() if asked[name] is None}
        try:
            problem = problem_of(**asked)
        except ValueError as error:
            refuse(str(error))
        command(problem, **given)

    everything = own | options
    with_options.__annotations__ = {name: one.annotation for name, one in everything.items()}
    with_options.__signature__ = inspect.Signature([*everything.values()])  # type: ignore[attr-defined]
    return with_options


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, whose annotations are no longer strings."""
    hints = get_type_hints(function, localns={"Problem": Any}, include_extras=True)  # imported for type checkers only
    found = inspect.signature(function).parameters
    return {name: one.replace(annotation=hints[name]) for name, one in found.items()}
