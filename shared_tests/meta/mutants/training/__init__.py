"""Mistakes in how a model is trained, and exactly those claims of a run that each of them fails.

A mutant is an edit in the source of one module. A small float64 run with the edited module is compared with the
reference as every run is. A claim that fails proves that the suite would notice the mistake. A claim that still holds
shows where the mistake hides: AdamW, for example, makes the same first update whatever the scale of the gradient is,
apart from rounding.
"""

from __future__ import annotations

from shared_tests.meta.mutants.training.blocks import BLOCKS
from shared_tests.meta.mutants.training.blocks_jax import BLOCKS_JAX
from shared_tests.meta.mutants.training.context import CONTEXT
from shared_tests.meta.mutants.training.harmless import HARMLESS as HARMLESS
from shared_tests.meta.mutants.training.jax import JAX
from shared_tests.meta.mutants.training.meshes import MESHES
from shared_tests.meta.mutants.training.mutant import ALL as ALL
from shared_tests.meta.mutants.training.mutant import RAISES as RAISES
from shared_tests.meta.mutants.training.mutant import STUCK as STUCK
from shared_tests.meta.mutants.training.mutant import UPDATE as UPDATE
from shared_tests.meta.mutants.training.mutant import Mutant as Mutant
from shared_tests.meta.mutants.training.shared import SHARED
from shared_tests.meta.mutants.training.torch import TORCH
from shared_tests.meta.mutants.training.zero import ZERO

MUTANTS = (*TORCH, *JAX, *SHARED, *MESHES, *ZERO, *BLOCKS, *CONTEXT, *BLOCKS_JAX)
