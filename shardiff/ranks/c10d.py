"""The operators of torch.distributed, as data. Needs no torch.

c10d::allreduce_ and ProcessGroup.allreduce have the same name, and nearly all take their tensors in the same order, so
one table serves the tracer, which sees operators, and what notes the calls of ranks, which sees methods.
"""

from __future__ import annotations

# Name -> op, position of the argument whose bytes are the payload, whether it counts once for each rank of the group.
# Names differ between versions of torch.
COLLECTIVES: dict[str, tuple[str, int, bool]] = {
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "broadcast": ("broadcast", 0, False),
    "reduce": ("reduce", 0, False),
    "scatter": ("scatter", 0, True),
    "gather": ("gather", 1, True),
    "allgather": ("all_gather", 0, False),
    "_allgather_base": ("all_gather", 0, False),
    "all_gather_single": ("all_gather", 0, False),
    "allgather_coalesced": ("all_gather", 0, False),
    "allgather_into_tensor_coalesced": ("all_gather", 0, False),
    "all_gather_single_coalesced": ("all_gather", 0, False),
    "reduce_scatter": ("reduce_scatter", 1, False),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
}
BARRIERS: dict[str, tuple[str, int, bool]] = {
    "barrier": ("barrier", 0, False),
    "monitored_barrier": ("barrier", 0, False),
}
MESSAGES: dict[str, tuple[str, int, bool]] = {
    "send": ("send", 0, False),
    "recv": ("recv", 0, False),
    "recv_any_source": ("recv", 0, False),  # the operator
    "recv_anysource": ("recv", 0, False),  # the method
}
C10D = COLLECTIVES | BARRIERS | MESSAGES
FUNCTIONAL: dict[str, tuple[str, int, bool]] = {
    "all_reduce": ("all_reduce", 0, False),
    "all_reduce_coalesced": ("all_reduce", 0, False),
    "all_gather_into_tensor": ("all_gather", 0, True),
    "all_gather_into_tensor_out": ("all_gather", 0, True),
    "all_gather_into_tensor_coalesced": ("all_gather", 0, True),
    "reduce_scatter_tensor": ("reduce_scatter", 0, False),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, False),
    "all_to_all_single": ("all_to_all", 0, False),
    "broadcast": ("broadcast", 0, False),
    "isend": ("send", 0, False),
    "irecv": ("recv", 0, False),
}
