"""What each strategy refuses, holds, sends and keeps, derived from the sizes alone: one file for each.

Every file has all of these names, in this order; what is missing is an error, not another strategy's formula:

    AXIS                                the mesh axis that it uses
    UNIT                                layers that stay together: 2 where a strategy splits them in pairs
    refusal(asked, n)                   why n ranks cannot do it, in one line; None if they can
    rows(total, n)                      the rows of the batch that each of n ranks has of `total`
    cut(parts, problem, n, index, unit) the parts of the parameters that rank `index` of n holds of `parts`
    communication(share, n)             what one group of n ranks sends in one step, as `Sent`; its first rank's share
    kept(layers, residual, n)           what a rank keeps for the backward pass, of what it would keep without
"""

from __future__ import annotations

import importlib
from typing import Any


def of(strategy: str) -> Any:
    """The module of a strategy."""
    return importlib.import_module(f"contract.strategies.{strategy}")
