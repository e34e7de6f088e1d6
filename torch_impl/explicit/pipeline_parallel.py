"""Pipeline parallel: the layers split into stages over `pp`, the batch into microbatches, run in GPipe's order.

Forward: every microbatch's activations are sent to the next stage. Backward: their gradients to the stage before.
(B / m) D e bytes for each of m microbatches and n - 1 boundaries, each way (Huang et al., 1811.06965). The loss is the
last stage's, told to all by one scalar all_reduce. What a stage does when is data: `contract.schedule`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from contract.problem import Batch, Layer, split_slices
from contract.schedule import Action, actions, gpipe
from contract.strategy import Run
from torch_impl.model import clear_grads, gelu, grads_of, squared_error

AXIS = "pp"


def split_params(params: list[Layer], mesh: DeviceMesh, run: Run) -> list[Layer]:
    """A stage's layers, whole: W[D, F], b[F]."""
    return params[split_slices(len(params), mesh.size())[mesh.get_local_rank(AXIS)]]


def split_batch(batch: Batch, mesh: DeviceMesh, run: Run) -> Batch:
    """The whole batch; only the first stage reads X[B, D], only the last one Y[B, D]."""
    return batch


def loss(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> Tensor:
    """The mean squared error, a scalar, the same on every rank."""
    return execute(params, batch, mesh, run, kinds=("forward",))


def loss_and_grads(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run) -> tuple[Tensor, list[Layer]]:
    """The loss, and the gradients of a stage's layers."""
    clear_grads(params)
    total = execute(params, batch, mesh, run, kinds=("forward", "backward"))
    return total, grads_of(params)


def forward(params: list[Layer], x: Tensor) -> Tensor:
    """One microbatch through one stage."""
    for w, b in params:
        x = gelu(x @ w + b)  # Y[B, F] = X[B, D] @ W[D, F]
    return x


def execute(params: list[Layer], batch: Batch, mesh: DeviceMesh, run: Run, kinds: tuple[str, ...]) -> Tensor:
    """Run the actions of these kinds that the schedule gives this stage, and return the loss of all microbatches."""
    group, stage, last = mesh.get_group(AXIS), mesh.get_local_rank(AXIS), mesh.size() - 1
    microbatches = [Batch(*parts) for parts in zip(*(a.tensor_split(run.microbatches) for a in batch), strict=True)]
    total = batch.weight.new_zeros(())
    saved: dict[int, tuple[Tensor, Tensor]] = {}  # microbatch -> (input, output) of this stage
    sends: list[tuple[dist.Work | None, Tensor]] = []  # a buffer must live until it is sent

    def source(action: Action) -> int:
        return stage - 1 if action.kind == "forward" else stage + 1

    def target(action: Action) -> int:
        return stage + 1 if action.kind == "forward" else stage - 1

    def receive(action: Action | None) -> tuple[dist.Work | None, Tensor] | None:
        if action is None or not 0 <= source(action) <= last:
            return None
        buffer = torch.empty_like(microbatches[action.microbatch].x)
        return dist.irecv(buffer, group=group, group_src=source(action)), buffer

    todo = [action for action in actions(gpipe(last + 1, run.microbatches), stage) if action.kind in kinds]
    incoming = receive(todo[0])
    for action, following in zip(todo, [*todo[1:], None], strict=True):
        if incoming is not None:
            incoming[0].wait()
        received = incoming and incoming[1]
        # Receive ahead, while computing. Not from the rank that this action sends to: NCCL runs what passes between
        # two ranks in order, and each would wait for the other.
        ahead = following is not None and source(following) != target(action)
        incoming = receive(following) if ahead else None

        i = action.microbatch
        if action.kind == "forward":
            x = microbatches[i].x if received is None else received.requires_grad_()
            out = forward(params, x)
            if stage == last:
                out = squared_error(out, microbatches[i])
                total += out.detach()
            saved[i], outgoing = (x, out), out.detach()
        else:
            x, out = saved.pop(i)
            out.backward(received)
            outgoing = x.grad
        if 0 <= target(action) <= last:
            sends.append((dist.isend(outgoing, group=group, group_dst=target(action)), outgoing))
        if action == Action("forward", run.microbatches - 1):  # the loss is told to all while the backward pass runs
            sends.append((dist.all_reduce(total, group=group, async_op=True), total))
        if not ahead:
            incoming = receive(following)
    for work, _ in sends:
        work.wait()
    return total
