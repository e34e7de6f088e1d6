"""Mistakes in everything but training, each with the one test that must fail.

Mistakes in how a model is trained are in `training`.
"""

from __future__ import annotations

from shared_tests.meta.mutants.planted.blocks import BLOCKS
from shared_tests.meta.mutants.planted.collectives import COLLECTIVES
from shared_tests.meta.mutants.planted.diff import DIFF
from shared_tests.meta.mutants.planted.figures import FIGURES
from shared_tests.meta.mutants.planted.gradients import GRADIENTS
from shared_tests.meta.mutants.planted.planner import PLANNER
from shared_tests.meta.mutants.planted.plant import ASSERTS as ASSERTS
from shared_tests.meta.mutants.planted.plant import Planted as Planted
from shared_tests.meta.mutants.planted.problems import PROBLEMS
from shared_tests.meta.mutants.planted.reader import READER
from shared_tests.meta.mutants.planted.schedules import SCHEDULES
from shared_tests.meta.mutants.planted.tracing import API, RANKS, VERIFIER

PLANTED = (
    *COLLECTIVES,
    *BLOCKS,
    *SCHEDULES,
    *READER,
    *DIFF,
    *GRADIENTS,
    *FIGURES,
    *PROBLEMS,
    *PLANNER,
    *VERIFIER,
    *RANKS,
    *API,
)
