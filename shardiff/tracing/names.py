"""What a call moves, by name: a parameter, its gradient, or the module for which it is made."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardiff.record import BITS, Part, num_bytes
from shardiff.tracing.calls import Call
from shardiff.tracing.libraries import ddp_buckets, is_ddp, next_leaves
from shardiff.tracing.where import user_file

NO_NAMES = ("undefined", "default_pg", "mesh_default", "")
PLAIN = (Tensor, nn.Parameter)
Span = tuple[int, int]
Moved = tuple[Literal["parameter", "gradient", "activation"], str]  # a Record's `moves` and `detail`


class Names:
    """params: by name, as far as they are known; find: learn those of the modules that run.

    Where two models have parameters of the same name, all are called by their model's variable too: actor.0.weight.
    """

    def __init__(self, params: Mapping[str, Tensor] | None) -> None:
        self.params: dict[str, Tensor] = dict(params or {})
        self.find = params is None
        self.roots: list[tuple[str, dict[str, Tensor]]] = []  # the models: variable, parameters
        self.paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.buckets: weakref.WeakKeyDictionary[nn.Module, list[tuple[int, list[str]]]] = weakref.WeakKeyDictionary()
        self.sent: dict[int, int] = {}  # payload of a bucket -> how many of that size were sent in this backward pass
        self.meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
        self.num_meshes = 0  # that there ever were
        self.axes: dict[str, str] = {}

    def learn(self, module: nn.Module) -> None:
        """The names in a module that runs on its own, not inside another."""
        if module in self.paths:
            return
        for path, each in module.named_modules():
            self.paths.setdefault(each, path)
        if not self.find:
            return
        known = {id(p) for _, params in self.roots for p in params.values()}
        inner = module.module if is_ddp(module) else module
        assert isinstance(inner, nn.Module)
        new: dict[str, Tensor] = {name: p for name, p in inner.named_parameters() if id(p) not in known}
        if new:
            self.roots.append((variable(module, [name for name, _ in self.roots]), new))
        names = [name for _, params in self.roots for name in params]
        clash = len(names) > len(set(names))
        self.params = {
            f"{root}.{name}" if clash else name: p for root, params in self.roots for name, p in params.items()
        }

    def moved(self, tensors: Iterable[Tensor]) -> Moved | None:
        """Whose gradient, or which parameter, lies in the memory of these tensors."""
        spans = [span(t) for t in tensors] if self.params else []
        whole = min((a for a, _ in spans), default=0), max((b for _, b in spans), default=0)
        found: dict[str, list[str]] = {"gradient": [], "": []}
        for name, p in self.params.items() if spans else ():
            for kind, t in (("gradient", p.grad if p.is_leaf or p.retains_grad else None), ("", p)):
                if t is not None and near(t, whole) and any(overlap(span(t), other) for other in spans):
                    found[kind].append(name)
                    break
        for kind, whose in found.items():
            if whose:
                return gradients(whose) if kind else ("parameter", listed(whose))
        leaves = {id(leaf) for leaf in next_leaves()} if self.params else ()
        handed = [name for name, p in self.params.items() if id(p) in leaves] if leaves else []
        return gradients(handed) if handed else None

    def bucket(self, payload_bytes: int) -> Moved | None:
        """The gradients in a bucket of this size, of a DistributedDataParallel that sends it now."""
        for buckets in self.buckets.values():
            fitting = [names for size, names in buckets if size == payload_bytes]
            if fitting:
                number = self.sent.get(payload_bytes, 0)
                self.sent[payload_bytes] = number + 1
                return gradients(fitting[number % len(fitting)])
        return None

    def note_buckets(self, module: nn.Module) -> None:
        """Of a DistributedDataParallel whose forward pass has ended: in its backward pass they cannot be asked for."""
        if is_ddp(module):
            self.buckets[module] = ddp_buckets(module)

    def axis(self, group: Any) -> str | None:
        """What a group is called: by an axis of a DeviceMesh that has been made, or as its maker has described it."""
        desc = group.group_desc
        if desc not in NO_NAMES:
            return desc.removeprefix("mesh_")
        if group.group_name not in self.axes:  # torch makes no group for an axis that is the whole world
            for mesh in list(self.meshes):
                for i, name in enumerate(mesh.mesh_dim_names or ()):
                    if mesh.get_coordinate() is not None:
                        self.axes.setdefault(mesh.get_group(i).group_name, name)
        return self.axes.get(group.group_name)

    def note_mesh(self, _: str, mesh: DeviceMesh, __: Any) -> None:
        """A DeviceMesh has been made."""
        if mesh.mesh_dim_names:
            self.meshes.add(mesh)
            self.num_meshes += 1

    def find_meshes(self) -> None:
        """Those that are there already."""
        for each in gc.get_objects():
            if type(each) is DeviceMesh:
                self.note_mesh("", each, None)


def variable(module: nn.Module, taken: list[str]) -> str:
    """The name of the first variable, of the user's running functions, that holds this module; else its class."""
    frame = sys._getframe(1)
    found: str | None = None
    while frame is not None:
        if user_file(frame.f_code.co_filename):
            for space in (frame.f_locals, frame.f_globals):
                for name, value in list(space.items()):
                    if value is module and name != "self" and not name.startswith("_") and name not in taken:
                        found = name  # the outermost frame knows it by its own name
                        break
        frame = frame.f_back
    name = found or type(module).__name__.lower()
    return name if name not in taken else f"{name}{len(taken) + 1}"


def gradients(names: list[str]) -> Moved:
    return "gradient", f"gradient{'s' * (len(names) > 1)} of {listed(names)}"


def parts_of_unit(params: Sequence[tuple[str, tuple[int, ...], int]], call: Call) -> tuple[Part, ...]:
    """The parameters, or their gradients, in a bucket that an FSDP2 unit gathers, scatters or reduces; () where it has
    others. params: as `fsdp_params` has them."""
    if len(params) < 2 or call.dtype not in BITS:
        return ()
    copies = 1 if call.op == "all_reduce" else len(call.ranks)  # that is of a shard
    sizes = [num_bytes(elements * copies, call.dtype) for *_, elements in params]
    if sum(sizes) != call.payload_bytes:
        return ()
    found = []
    for (name, shape, elements), size in zip(params, sizes, strict=True):
        moves, detail = ("parameter", name) if call.op == "all_gather" else gradients([name])
        whole = shape if copies > 1 and math.prod(shape) == elements * copies else None
        found.append(Part(call.dtype, size, whole, moves, detail if name else None))
    return tuple(found)


def listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, ..., {names[-1]} ({len(names)})"


def near(t: Tensor, whole: Span) -> bool:
    """Whether a tensor may have memory in a span: what is known of most without their own, for every call anew."""
    if type(t) not in PLAIN or t.layout != torch.strided or t.is_meta:
        return True
    start = t.data_ptr()
    return start < whole[1] and (not t.is_contiguous() or start + t.nbytes > whole[0])


def span(t: Tensor) -> Span:
    """The memory from a tensor's first element to its last, as addresses; of a DTensor, of the local one."""
    t = getattr(t, "_local_tensor", t)
    if t.layout != torch.strided or not t.numel() or t.is_meta:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def overlap(a: Span, b: Span) -> bool:
    """Whether two spans share an address."""
    return a[0] < b[1] and b[0] < a[1]
