"""The closed form of a step's products is what torch counts, also of what is recomputed."""

from __future__ import annotations

import pytest

from benchmarks.flops import products
from contract.problem import Problem
from contract.strategy import RECOMPUTE, Run
from contract.transformer import Transformer

BLOCKS = Transformer(batch=2, width=16, layers=2, sequence=4, heads=4, ff=24)


@pytest.mark.parametrize(
    ("problem", "recompute"), [(Problem(8, 16, 4), "none"), *((BLOCKS, name) for name in RECOMPUTE)]
)
def test_products_are_those_that_torch_counts(problem, recompute):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from torch_impl import train
    from torch_impl.compose import loss_and_grads
    from torch_impl.mesh import Mesh

    run, mesh, device = Run("torch", (), problem, recompute=recompute), Mesh({}, problem.unit), torch.device("cpu")
    params, batch = train.make_params(mesh, run, device), train.make_batch(mesh, run, 0, device)
    with FlopCounterMode(display=False) as counter:
        loss_and_grads(params, batch, mesh, run)
    assert counter.get_total_flops() == products(problem, recompute)
