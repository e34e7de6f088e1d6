"""What is run: on a GPU, and in a rehearsal on the CPU, where everything is the same but small."""

from __future__ import annotations

from dataclasses import dataclass

from contract.axes import AXES_OF_BLOCKS, STRATEGIES, Axes, one_axis, parse_axes
from contract.problem import Problem
from contract.transformer import Transformer

DTYPES = ("float32", "bfloat16", "float64")  # in order of value
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """device: "cuda" or "cpu". proof, proof_blocks: the MLP and the transformer that are compared with the reference.
    step, step_block: those whose steps are timed. mocked: ranks of the program of which one is run. copies, payloads:
    bytes. dtypes: of proofs. every_dtype: whether every strategy of the MLP is proven in all of them; if not, in the
    others than the first the single device and the meshes are. compiled: the dtypes of the steps by torch.compile."""

    device: str
    proof: Problem
    proof_blocks: Transformer
    step: Problem
    step_block: Transformer
    iterations: int
    mocked: int
    copies: tuple[int, ...]
    payloads: tuple[int, ...]
    dtypes: tuple[str, ...] = DTYPES
    every_dtype: bool = True
    compiled: tuple[str, ...] = DTYPES[:2]


GPU = Sizes(
    device="cuda",
    proof=Problem(batch=64, width=256, layers=4),
    proof_blocks=Transformer(batch=8, width=128, layers=2, sequence=64, heads=8, ff=256),
    step=Problem(batch=8192, width=8192, layers=4),
    step_block=Transformer(batch=2, width=4096, layers=1, sequence=2048, heads=32, ff=16384),
    iterations=10,
    mocked=8,
    copies=(MIB, 64 * MIB, 1024 * MIB),
    payloads=(4096, MIB, 256 * MIB),
)
REHEARSAL = Sizes(
    device="cpu",
    proof=Problem(batch=16, width=32, layers=2),
    proof_blocks=Transformer(batch=4, width=16, layers=2, sequence=8, heads=4, ff=24),
    step=Problem(batch=64, width=128, layers=2),
    step_block=Transformer(batch=2, width=64, layers=1, sequence=32, heads=4, ff=128),
    iterations=2,
    mocked=2,
    copies=(MIB,),
    payloads=(4096,),
    dtypes=DTYPES[:2],  # on the CPU, float64 is what the suite proves
    every_dtype=False,
    compiled=DTYPES[:1],  # most of a rehearsal's time would be that of a C++ compiler
)


def of(device: str) -> Sizes:
    """The sizes for a device."""
    return GPU if device == "cuda" else REHEARSAL


def alone() -> list[Axes]:
    """Every strategy, and meshes of them, with one rank on each axis."""
    meshes = [parse_axes("dp=1,tp=1,pp=1"), parse_axes("dp=1,tp=1,pp=1", ("tensor_parallel",))]
    return [one_axis("single_device", 1), *(one_axis(strategy, 1) for strategy in STRATEGIES), *meshes]


def shared() -> list[Axes]:
    """Every strategy with 2 and with 4 ranks, and meshes of 4; those of 2 ranks first."""
    meshes = [parse_axes("dp=2,tp=2"), parse_axes("dp=2,tp=2", ("tensor_parallel",)), parse_axes("dp=2,pp=2")]
    return [*(one_axis(strategy, ranks) for ranks in (2, 4) for strategy in STRATEGIES), *meshes]


def alone_blocks() -> list[Axes]:
    """The single device, every strategy that only blocks have, and meshes with those of the MLP, one rank each."""
    meshes = [parse_axes("dp=1,cp=1,tp=1,pp=1", ("ulysses",)), parse_axes("fsdp=1,tp=1", ("sequence_parallel",))]
    return [one_axis("single_device", 1), *(one_axis(strategy, 1) for strategy in AXES_OF_BLOCKS), *meshes]


def shared_blocks() -> list[Axes]:
    """Every strategy that only blocks have, with 2 ranks, and meshes of 4."""
    meshes = [parse_axes("cp=2,tp=2"), parse_axes("fsdp=2,tp=2", ("sequence_parallel",)), parse_axes("pp=2,dp=2")]
    return [*(one_axis(strategy, 2) for strategy in AXES_OF_BLOCKS), *meshes]


def of_one() -> list[tuple[str, Axes]]:
    """(implementation, axes) of the programs of one rank that are compiled for the device and for a target."""
    mesh = parse_axes("dp=1,tp=1,pp=1")
    return [("annotated", one_axis("single_device", 1)), ("annotated", mesh), ("shard_map", mesh)]


def mocked(ranks: int) -> list[tuple[str, Axes]]:
    """(implementation, axes) of the programs of which one rank is run."""
    half = ranks // 2
    return [
        ("annotated", one_axis("data_parallel", ranks)),
        ("annotated", one_axis("megatron_tensor_parallel", ranks)),
        ("shard_map", one_axis("megatron_tensor_parallel", ranks)),
        ("annotated", one_axis("tensor_parallel", ranks)),
        ("annotated", parse_axes(f"dp={ranks // half},tp={half}")),
    ]
