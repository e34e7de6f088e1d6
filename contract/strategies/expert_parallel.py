"""Expert parallel (Lepikhin et al., 2006.16668): samples and experts are split; tokens travel to their experts.

Forward: all_to_all before the experts and after them, E B C D e bytes each for a rank's B samples, with C slots of an
expert for every sample. Backward: the same two. Everything but the experts is replicated: all_reduce of its gradients,
once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.kept import Kept
from contract.problem import Problem, split_sizes
from contract.share import HELD, Asked, Part, Sent, Share, narrow_dims
from contract.transformer import EXPERT_DIMS, Experts, Transformer

AXIS = "ep"
UNIT = 2
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """Experts and samples must divide evenly, as all_to_all needs equal parts."""
    problem = asked.problem
    if not isinstance(problem, Transformer) or not problem.experts:
        return "expert_parallel splits the experts of a transformer, and the problem has none"
    if problem.experts % n:
        return f"expert_parallel needs experts that its degree divides: {problem.experts} experts, degree {n}"
    if problem.batch % n:
        return f"expert_parallel needs a batch divisible by its degree: batch {problem.batch}, degree {n}"
    return None


def rows(total: int, n: int) -> list[int]:
    """The samples are split."""
    return split_sizes(total, n)


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """A rank's experts: up[E_ep, D, F], down[E_ep, F, D]. Everything else is whole."""
    return narrow_dims(parts, problem, EXPERT_DIMS, n, index)


def communication(share: Share, n: int) -> Iterator[Sent]:
    """Two all_to_alls each way for every layer with experts; the loss; gradients of everything but the experts."""
    problem = share.problem
    assert isinstance(problem, Transformer)
    for phase in ("forward", "backward"):
        for one in share.passes:
            for part in share.parts_of(one):
                if isinstance(part.cuts, Experts):
                    size = one.rows * problem.experts * problem.capacity * problem.width
                    ways = ("to the experts", "from the experts")
                    for what in ways if phase == "forward" else (f"gradient of what goes {way}" for way in ways):
                        again = phase == "forward"
                        yield Sent("all_to_all", size, phase, f"{what} of layer {part.layer}", again=again)
    yield share.loss()
    for part in reversed(share.used):
        for name, elements in reversed(share.tensors(part)):
            if not (isinstance(part.cuts, Experts) and name.startswith(("up", "down"))):
                yield Sent("all_reduce", elements, "backward", f"gradient of {name}")


def kept(tensors: Sequence[Kept], n: int) -> list[Kept]:
    """A rank's experts have as many tokens of all ranks as all experts have of the rank's own."""
    return list(tensors)
