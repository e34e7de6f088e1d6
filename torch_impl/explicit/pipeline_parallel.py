"""Pipeline parallel: the layers are split into stages over `pp`, the batch into microbatches, in a schedule's order.

Forward: every microbatch's activations are sent to the next part of the model. Backward: their gradients are sent to
the part before. (B / m) D e bytes for each of m microbatches and each boundary between parts on different stages, each
way (Huang et al., 1811.06965). The stage with the last part has the loss, and one scalar all_reduce gives it to all.
What a stage does when is data, whatever the schedule: its actions in `contract.schedule`, and between them the messages
in `contract.messages`, whose order no stage has to wait for in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from contract.messages import programs
from contract.problem import Batch, Layer, split_sizes, split_slices
from contract.schedule import Action, Schedule
from torch_impl import passes
from torch_impl.mesh import Mesh

AXIS = "pp"
Observer = Callable[[str, Action | None], AbstractContextManager[None]]  # what it surrounds, and for which action


def split_params(params: list[Layer], mesh: Mesh) -> list[Layer]:
    """The layers of a stage's chunks, whole: W[D, F], b[F]."""
    pieces = split_slices(len(params) // mesh.unit, len(schedule_on(mesh).parts))
    mine = [pieces[part] for part in parts_on(mesh)]
    return [layer for piece in mine for layer in params[piece.start * mesh.unit : piece.stop * mesh.unit]]


def chunk_sizes(layers: int, mesh: Mesh) -> list[int]:
    """How many layers each chunk of a stage has."""
    sizes = split_sizes(layers // mesh.unit, len(schedule_on(mesh).parts))
    return [sizes[part] * mesh.unit for part in parts_on(mesh)]


def parts_on(mesh: Mesh) -> list[int]:
    """The parts of the model that this rank's stage holds, chunk by chunk."""
    schedule = schedule_on(mesh)
    return [schedule.parts.index((mesh.rank(AXIS), chunk)) for chunk in range(schedule.chunks)]


def schedule_on(mesh: Mesh) -> Schedule:
    """The schedule of the mesh, which has a pipeline."""
    assert mesh.schedule is not None
    return mesh.schedule


def execute(
    chunks: Sequence[Sequence[passes.Function]],
    loss: Callable[[Tensor, Batch], Tensor],
    total: Callable[[Tensor], None],
    batch: Batch,
    mesh: Mesh,
    forward_only: bool = False,
    observe: Observer = lambda kind, action: nullcontext(),
    input_grad: bool = False,
    kept: dict[tuple[int, int], passes.Passage] | None = None,
) -> None:
    """Run a stage's program: forward and backward passes, and what must be sent between stages.

    chunks: of this stage, each as functions of a microbatch X[b, D] to be run one after the other. What the last gives
    is split as the targets are. loss: maps the model's output to its share. total: is given the sum of all shares once
    the forward passes are done. observe: is entered around every action, "send" and "wait". input_grad: the first part
    computes its input's gradient too, so that all do the same work. kept: is filled with what is kept, for who looks.
    """
    schedule, group, stage = schedule_on(mesh), mesh.group(AXIS), mesh.rank(AXIS)
    parts = [Batch(*each) for each in zip(*(a.tensor_split(schedule.microbatches) for a in batch), strict=True)]
    share = batch.weight.new_zeros(())
    saved = {} if kept is None else kept  # (chunk, microbatch) -> its passage
    incoming: dict[Action, tuple[dist.Work | None, Tensor]] = {}  # from another stage, by the action that made it
    results: dict[Action, Tensor | None] = {}  # what this stage's next chunk, or a send, will take
    sends: list[tuple[dist.Work | None, Tensor]] = []  # a buffer must live until it is sent

    def wait(work: dist.Work | None) -> None:
        with observe("wait", None):
            assert work is not None  # this rank is in the group
            work.wait()

    def act(action: Action, received: Tensor | None) -> Tensor | None:
        """One pass. Returns what another part needs of it."""
        chunk, i = action.chunk, action.microbatch
        if action.kind == "backward_weight":
            passes.backward_weight(saved[chunk, i])
            del saved[chunk, i]
            return None
        if action.kind == "backward_input":
            return passes.backward_input(saved[chunk, i], received)
        if action.kind == "backward":
            return passes.backward(saved.pop((chunk, i)), received)
        first, last = schedule.source(action) is None, schedule.target(action) is None
        x = parts[i].x if first else received
        assert x is not None
        x = x.detach().requires_grad_(not first or input_grad)
        *functions, final = chunks[chunk]
        saved[chunk, i] = passes.forward([*functions, (lambda x: loss(final(x), parts[i])) if last else final], x)
        out = saved[chunk, i].segments[-1][1].detach()
        if last:
            share.add_(out)
        return out

    for op, action in programs(schedule, forward_only)[stage]:
        if action is None:
            total(share)
        elif op == "receive":
            buffer = torch.empty_like(parts[action.microbatch].y)  # every output is split as the targets are
            with observe("send", action):
                incoming[action] = dist.irecv(buffer, group=group, group_src=action.stage), buffer
        elif op == "send":
            outgoing, target = results.pop(action), schedule.target(action)
            assert outgoing is not None and target is not None  # what was received has a gradient
            outgoing = outgoing.contiguous()
            with observe("send", action):
                sends.append((dist.isend(outgoing, group=group, group_dst=target.stage), outgoing))
        else:
            received, source = None, schedule.source(action)
            if source is not None and source.stage != stage:
                work, received = incoming.pop(source)
                wait(work)
            elif source is not None:  # this stage has made it
                received = results.pop(source)
            with observe(action.kind, action):
                result = act(action, received)
            if schedule.target(action) is not None:
                results[action] = result
    for work, _ in sends:
        wait(work)


def total(share: Tensor, mesh: Mesh) -> dist.Work | None:
    """L = AllReduce_pp(L{U_pp}), in place: the last part's loss, as the other stages' shares are zero."""
    return dist.all_reduce(share, group=mesh.group(AXIS), async_op=True)
