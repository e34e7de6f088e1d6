"""Pipeline parallel (Huang et al., 1811.06965): the layers are split into stages, the batch into microbatches.

Forward: permute of activations, (B / m) D e bytes for each of m microbatches and n - 1 stage boundaries. Backward:
permute of their gradients, as many. The sends of one tick are one permute. GPipe's order has m + n - 1 ticks each way,
but no stage sends in the last one, so there are m + n - 2 permutes. Under annotations a stage is a part of one shifted
buffer (GSPMD, 2105.04663, section 3.3), and each of the m + n - 1 ticks permutes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contract.problem import Problem, split_slices
from contract.share import HELD, Asked, Kept, Part, Sent, Share

AXIS = "pp"
UNIT = 1
DEPTH = 2
SPLITS = HELD


def refusal(asked: Asked, n: int) -> str | None:
    """Every stage needs a layer, or a pair of layers, and every microbatch needs a sample."""
    stages = asked.problem.layers // asked.unit
    if stages < n:
        of = "layers" if asked.unit == 1 else "pairs of layers"
        return f"pipeline_parallel over {n} stages needs at least {n} {of}, got {stages}"
    if asked.microbatches > asked.rows:
        m, of_rank = asked.microbatches, " on every rank" if asked.rows < asked.problem.batch else ""
        return f"{m} microbatches need a batch of at least {m}{of_rank}, got {asked.rows}"
    return None


def rows(total: int, n: int) -> list[int]:
    """Every stage works on the whole batch."""
    return [total] * n


def cut(parts: Sequence[Part], problem: Problem, n: int, index: int, unit: int) -> list[Part]:
    """A stage's layers, whole. `unit` layers stay together."""
    stage = split_slices(len(parts) // unit, n)[index]
    return list(parts[stage.start * unit : stage.stop * unit])


def communication(share: Share, n: int) -> Iterator[Sent]:
    """One permute for each tick in which a stage sends, as large as the largest microbatch sent in it; and the loss."""
    rows, width, m = share.microbatches, share.features, len(share.microbatches)
    if share.derived:
        edges, ticks = tuple((s, s + 1) for s in range(n - 1)), m + n - 1
        back = tuple((b, a) for a, b in edges)
        op, size = "collective_permute", max(rows) * width
        yield Sent(op, size, "forward", "activations of every tick", edges=edges, times=ticks)
        yield Sent(op, size, "backward", "gradients of every tick", edges=back, tick=1, times=ticks)
        yield share.loss()
        return
    for phase, what in (("forward", "activations"), ("backward", "gradients")):
        for tick in range(m + n - 2):
            # the backward pass is the mirror image: stage n - 1 - s sends s ticks after the last stage
            sending = [s for s in range(n - 1) if 0 <= tick - s < m]
            most = max(rows[tick - s] for s in sending)
            edges = tuple((s, s + 1) if phase == "forward" else (n - 1 - s, n - 2 - s) for s in sending)
            number = tick if phase == "forward" else m + n + tick
            yield Sent("collective_permute", most * width, phase, f"{what} of tick {tick}", None, edges, number)
    yield share.loss()


def kept(layers: Sequence[Kept], residual: float, n: int) -> tuple[list[Kept], float]:
    """A stage keeps what a single device keeps of its layers, of all microbatches: all forward passes come first."""
    return list(layers), residual
