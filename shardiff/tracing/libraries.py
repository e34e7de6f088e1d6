"""What is known of torch beyond its public API. All of it is here, and what a version does not have is passed over.

Which functions set up and do not train, whose gradients a bucket of DistributedDataParallel holds, which module an
FSDP2 unit belongs to, what autograd's engine does, and how torch's dispatcher finds a kernel.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

# Functions of torch, by their qualified names, in which nothing is trained yet: what they send is set-up.
SETUP = {
    "DeviceMesh.__init__",
    "DistributedDataParallel.__init__",
    "FullyShardedDataParallel.__init__",
    "ZeroRedundancyOptimizer.__init__",
    "PipelineStage._shape_inference",
    "PipelineStage._prepare_forward_infra",
    "PipelineStage._prepare_backward_infra",
    "_PipelineSchedule._initialize_stage",
    "PipelineScheduleSingle._initialize_stage",
    "PipelineScheduleMulti._initialize_stages",
    "distribute_module",
    "distribute_tensor",
    "fully_shard",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "parallelize_module",
    "_prepare_module_for_ddp",
    "_sync_module_states",
}


def in_setup(frame: FrameType) -> bool:
    """Whether this frame, one of torch's, is of a function that sets up."""
    return frame.f_code.co_qualname in SETUP


def arranges_buckets(frame: FrameType) -> bool:
    """Whether this frame, the innermost of Python's, is of a DistributedDataParallel that tells all ranks, once, how it
    has arranged the gradients in buckets: after the first backward pass, and before the next forward pass."""
    return frame.f_code.co_qualname == "DistributedDataParallel._pre_forward"


def fsdp_unit(frame: FrameType) -> str | None:
    """The module, by its path, of the FSDP2 unit that this frame, one of torch's, works for."""
    if not frame.f_code.co_qualname.startswith("FSDPParamGroup."):
        return None
    name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
    return None if name is None else name or "the root module"


def fsdp_params(frame: FrameType) -> list[tuple[str, tuple[int, ...], int]]:
    """The parameters of that unit in the order of its buckets: path, shape, and elements of a rank's padded shard."""
    with suppress(Exception):
        return [
            (p._param_fqn or "", tuple(p._orig_size), p.padded_sharded_param_size.numel())
            for p in frame.f_locals["self"].fsdp_params
        ]
    return []


def ddp_buckets(module: nn.Module) -> list[tuple[int, list[str]]]:
    """The buckets of a DistributedDataParallel, as they are sent: bytes, and whose gradients are in each.

    Until it has arranged them, after the first backward pass, they hold the parameters in reverse order. In a backward
    pass nobody may ask: its reducer would wait for itself.
    """
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data: dict[str, Any] = module._get_ddp_logging_data()  # type: ignore[operator]
        inner: Any = module.module
        named = [(name, p) for name, p in inner.named_parameters() if p.requires_grad]
        if data.get("has_rebuilt_buckets") and data.get("rebuilt_per_bucket_param_indices"):
            groups = [[int(i) for i in text.split()] for text in data["rebuilt_per_bucket_param_indices"].split(",")]
        else:
            groups, left = [], list(reversed(range(len(named))))
            for text in reversed(data.get("bucket_sizes", "").split(",")):
                groups.append([])
                size = int(text)
                while left and size > 0:
                    groups[-1].append(left.pop(0))
                    size -= named[groups[-1][-1]][1].nbytes
        return [(sum(named[i][1].nbytes for i in group), [named[i][0] for i in group]) for group in groups]
    return []


def is_ddp(module: nn.Module) -> bool:
    return isinstance(module, nn.parallel.DistributedDataParallel)


graph_task = torch._C._current_graph_task_id  # that autograd's engine works on in this thread; -1 for none


def backward_runs() -> bool:
    """Whether autograd's engine runs in this thread now."""
    return graph_task() != -1


def next_leaves() -> list[torch.Tensor]:
    """The parameters whose gradients the node of autograd that runs now hands over, as a Function around a parameter
    does; empty outside of its engine."""
    find: Any = getattr(torch._C, "_current_autograd_node", None)
    node = find() if find and backward_runs() else None
    variables = (getattr(after, "variable", None) for after, _ in (node.next_functions if node is not None else ()))
    return [variable for variable in variables if variable is not None]


def modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, outermost first."""
    return _get_current_dispatch_mode_stack()


def beneath(mode: TorchDispatchMode, wanted: bool) -> None:
    """Have this thread's operators pass by a mode, after those of the program, or no longer. The program's own modes
    stay as they are and end in their order: ours is beneath them, wherever in the program it comes and goes."""
    stack = modes()
    if (mode in stack) == wanted or any(each.is_infra_mode() for each in stack):  # these are a compiler's
        return
    for _ in stack:
        _pop_mode()
    for each in [*[mode] * wanted, *(each for each in stack if each is not mode)]:
        _push_mode(each)


def operators_of(space: str) -> Iterator[tuple[str, Any]]:
    """The operators of a namespace, with their names in it."""
    with suppress(ImportError):
        importlib.import_module("torch.distributed._symmetric_memory")  # defines some of its namespace
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith(f"{space}::"):
            name, _, overload = full.removeprefix(f"{space}::").partition(".")
            yield (
                full.removeprefix(f"{space}::"),
                getattr(getattr(getattr(torch.ops, space), name), overload or "default"),
            )


def below(keys: Any) -> Any:
    """The keys of a call that is dispatched, without the one at which we see it."""
    return keys.remove(torch._C.DispatchKey.BackendSelect)
