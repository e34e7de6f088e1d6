"""What each strategy refuses, holds, sends and keeps, derived from the sizes alone: one file for each strategy.

Every file has all of these names, in this order. A missing one is an error; there is no default formula:

    AXIS                                the mesh axis that it uses
    UNIT                                how many layers must stay together: 2 if it splits layers in pairs
    DEPTH                               how near to the computation it cuts: 0 replicates the parameters, 1 stores them
                                        or their optimizer state in shards, 2 computes on shards; the deeper one
                                        cuts first
    SPLITS                              what it cuts of "parameters", "gradients", and "optimizer_state"
    refusal(asked, n)                   why n ranks cannot run it, in one line; None if they can
    rows(total, n)                      how many of `total` rows of the batch each of n ranks has
    cut(parts, problem, n, index, unit) what rank `index` of n holds of `parts`, the parts of the parameters
    communication(share, n)             what one group of n ranks sends in one step, as `Sent`; share: of its first rank
    kept(tensors, n)                    what a rank keeps for the backward pass, of what it would keep without it
"""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def of(strategy: str) -> Any:
    """The module of a strategy."""
    return importlib.import_module(f"contract.strategies.{strategy}")


@functools.cache
def gathers(strategy: str) -> bool:
    """Whether a strategy stores parameters in shards and gathers them before use."""
    return of(strategy).DEPTH == 1 and "parameters" in of(strategy).SPLITS
