"""Pipeline parallel: the layers are split into stages over `pp`, the batch into microbatches, in a schedule's order.

Forward: every microbatch's activations are sent to the next stage. Backward: their gradients are sent to the stage
before. (B / m) D e bytes for each of m microbatches and n - 1 boundaries, each way (Huang et al., 1811.06965). The last
stage has the loss, and one scalar all_reduce gives it to all. What a stage does when is data: `contract.schedule`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from contract.problem import Batch, Layer, split_slices
from contract.schedule import Action
from torch_impl.mesh import Mesh

AXIS = "pp"
Observer = Callable[[str, Action | None], AbstractContextManager[None]]  # what it surrounds, and for which action


def split_params(params: list[Layer], mesh: Mesh) -> list[Layer]:
    """A stage's layers, whole: W[D, F], b[F]."""
    stage = split_slices(len(params) // mesh.unit, mesh.size(AXIS))[mesh.rank(AXIS)]
    return params[stage.start * mesh.unit : stage.stop * mesh.unit]


def execute(
    forward: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Batch], Tensor],
    total: Callable[[Tensor], None],
    batch: Batch,
    mesh: Mesh,
    todo: Sequence[Action],
    microbatches: int,
    observe: Observer = lambda kind, action: nullcontext(),
    input_grad: bool = False,
) -> None:
    """Run a stage's actions in their order: forward and backward passes, and what must be sent between stages.

    forward: maps one microbatch X[b, D] to Y[b, D], which is split as the targets are. loss: maps the last stage's
    output to its share. total: is given the sum of all shares once the forward passes are done. observe: is entered
    around every "forward", "backward", "send" and "wait". input_grad: the first stage computes its input's gradient
    too, so that all stages do the same work.
    """
    group, stage, last = mesh.group(AXIS), mesh.rank(AXIS), mesh.size(AXIS) - 1
    parts = [Batch(*each) for each in zip(*(a.tensor_split(microbatches) for a in batch), strict=True)]
    share = batch.weight.new_zeros(())
    saved: dict[int, tuple[Tensor, Tensor]] = {}  # microbatch -> (input, output) of this stage
    sends: list[tuple[dist.Work | None, Tensor]] = []  # a buffer must live until it is sent
    forward_left = sum(action.kind == "forward" for action in todo)

    def source(action: Action) -> int:
        return stage - 1 if action.kind == "forward" else stage + 1

    def target(action: Action) -> int:
        return stage + 1 if action.kind == "forward" else stage - 1

    def receive(action: Action | None) -> tuple[dist.Work | None, Tensor] | None:
        if action is None or not 0 <= source(action) <= last:
            return None
        buffer = torch.empty_like(parts[action.microbatch].y)  # every output is split as the targets are
        with observe("send", action):
            return dist.irecv(buffer, group=group, group_src=source(action)), buffer

    def wait(work: dist.Work | None) -> None:
        with observe("wait", None):
            assert work is not None  # this rank is in the group
            work.wait()

    incoming = receive(todo[0])
    for action, following in zip(todo, [*todo[1:], None], strict=True):
        if incoming is not None:
            wait(incoming[0])
        received = incoming and incoming[1]
        # Receive ahead, while computing, but not from the rank that this action sends to: NCCL runs the transfers
        # between two ranks in order, so each would wait for the other.
        ahead = following is not None and source(following) != target(action)
        incoming = receive(following) if ahead else None

        i = action.microbatch
        with observe(action.kind, action):
            if action.kind == "forward":
                x = parts[i].x if received is None else received
                x = x.detach().requires_grad_(received is not None or input_grad)
                out = forward(x)
                if stage == last:
                    out = loss(out, parts[i])
                    share += out.detach()
                saved[i], outgoing = (x, out), out.detach()
            else:
                x, out = saved.pop(i)
                out.backward(received)
                outgoing = x.grad
        if 0 <= target(action) <= last:
            assert outgoing is not None  # what was received has a gradient
            with observe("send", action):
                sends.append((dist.isend(outgoing, group=group, group_dst=target(action)), outgoing))
        forward_left -= action.kind == "forward"
        if forward_left == 0 and action.kind == "forward":
            total(share)
        if not ahead:
            incoming = receive(following)
    for work, _ in sends:
        wait(work)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_pp(L{U_pp}), in place: the last stage's loss, as the other stages' shares are zero."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
