"""`shardiff.read(x)`: what an XLA program communicates, as a `Program`, from whatever one has of it.

shardiff.read(jax.jit(f).lower(*args).compile())    a compiled program: its memory and its mesh's axes come with it
shardiff.read(jax.jit(f).lower(*args))              a lowered one, which is compiled first
shardiff.read(text)                                 HLO text
shardiff.read("dump/module_0001.jit_f.sm_9.0_gpu_after_optimizations.txt")      a file, gzipped or not
shardiff.read("dump")                               a folder that --xla_dump_to has filled
shardiff.read("step.json")                          what `shardiff trace` or `hlo` wrote with --json
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardiff import hlo
from shardiff.compiling import devices
from shardiff.mesh import Mesh
from shardiff.mesh import parse as parse_mesh
from shardiff.program import Program
from shardiff.ranks.jax_devices import quiet_stderr
from shardiff.system import inputs
from shardiff.system.extras import require

if TYPE_CHECKING:
    import jax

MEMORY = {  # a Program's name of it -> jax's
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "generated_code": "generated_code_size_in_bytes",
    "aliased": "alias_size_in_bytes",
}
SHARDY_MESH = re.compile(
    r"sdy\.mesh @\w+ = <\[(\"[^\]>]*)\]>"
)  # one with device_ids lists the same ranks in another order
SHARDY_AXIS = re.compile(r'"([^"]+)"=(\d+)')
OPTIMIZED = ("*after_optimizations.txt", "*after_optimizations.txt.gz")


def read(
    source: jax.stages.Compiled | jax.stages.Lowered | str | Path,
    *,
    mesh: Mesh | jax.sharding.Mesh | str | None = None,
    label: str | None = None,
) -> Program:
    """What a program communicates in one step.

    source: a Compiled, a Lowered (it is compiled), HLO text, or the path of a text, of a dump's folder, or of JSON that
    shardiff wrote. mesh: its ranks on named axes, outermost first, in the order of the program's devices; "dp=4,tp=4",
    a jax Mesh or a shardiff.mesh.Mesh; by default that of the shardings of a Compiled or a Lowered. label: what tables
    call the program; by default its name.

    Raises ValueError, one line, for what is no such thing, and what XLA raises where a Lowered cannot be compiled.
    """
    ranks = _ranks(mesh)
    if isinstance(source, str | Path):
        program = _read_text(source)
    elif hasattr(source, "memory_analysis") and hasattr(source, "as_text"):
        program = _read_compiled(source)
    elif hasattr(source, "compile") and hasattr(source, "as_text"):
        program = _read_lowered(source)
    else:
        raise ValueError(
            "read takes a jax.stages.Compiled or Lowered, HLO text, or a path; got a "
            f"{type(source).__name__}: for a function, shardiff.compile(function, *args)"
        )
    return replace(program, label=label or program.label, mesh=ranks or program.mesh)


def compile(function: Any, *args: Any, **kwargs: Any) -> Program:
    """What a JAX function communicates when it is called with these arguments.

    function: jitted, or anything that jax.jit takes. args, kwargs: arrays, or the shapes of arrays
    (jax.ShapeDtypeStruct) with shardings on a mesh of `shardiff.mesh`. It is lowered and compiled, and not run.
    """
    require("shardiff.compile", "jax")
    import jax

    return read((function if hasattr(function, "lower") else jax.jit(function)).lower(*args, **kwargs))


def _ranks(mesh: Any) -> Mesh | None:
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
        return Mesh(tuple(zip(map(str, mesh.axis_names), mesh.devices.shape, strict=True)))
    raise ValueError(f"mesh must be axes such as dp=4,tp=4, a jax Mesh or a shardiff Mesh, got a {type(mesh).__name__}")


def _of_module(module: hlo.Module) -> Program:
    return Program(tuple(module.records), module.name)


def _read_lowered(lowered: Any) -> Program:
    """Compile it, with the option that an absent GPU needs."""
    ranks = _shardy_mesh(lowered.as_text())
    options = devices.compiler_options("gpu" if _for_gpu(lowered) else "")
    with quiet_stderr():
        compiled = lowered.compile(options) if options else lowered.compile()
    program = _read_compiled(compiled)
    return Program(program.records, program.label, ranks or program.mesh, program.memory)


def _for_gpu(lowered: Any) -> bool:
    """Whether it is lowered for GPUs. jax has no public way to ask a Lowered for its devices."""
    arguments = getattr(getattr(lowered, "_lowering", None), "compile_args", None) or {}
    platform = getattr(arguments.get("backend"), "platform", None)
    return platform in ("gpu", "cuda")


def _shardy_mesh(text: str) -> Mesh | None:
    """The mesh that lowered text names its shardings on."""
    if (found := SHARDY_MESH.search(text)) is None:
        return None
    return Mesh(tuple((name, int(size)) for name, size in SHARDY_AXIS.findall(found[1])))


def _read_compiled(compiled: Any) -> Program:
    module = hlo.read(compiled.as_text(), "the compiled program")
    plan = compiled.memory_analysis()
    memory = {name: int(getattr(plan, field)) for name, field in MEMORY.items() if hasattr(plan, field)}
    return Program(tuple(module.records), module.name, _mesh_of_shardings(compiled, module.num_devices), memory)


def _mesh_of_shardings(compiled: Any, num_devices: int) -> Mesh | None:
    """The mesh of the first array that is on one."""
    import jax

    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and getattr(mesh, "size", 0) >= num_devices:
            return _ranks(mesh)
    return None


def _read_text(source: str | Path) -> Program:
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("HloModule")):
        return _of_module(hlo.read(source))
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".json":
        return _read_json(path)
    return _of_module(hlo.read_bytes(inputs.read_bytes(path), str(path), inputs.most_bytes()))


def _read_folder(folder: Path) -> Program:
    """The one module of a dump that communicates. Raises ValueError where there are several, or no modules at all."""
    paths = sorted({path for pattern in OPTIMIZED for path in folder.glob(pattern)})
    if not paths:
        raise ValueError(
            f"{folder}: no *after_optimizations.txt in this folder; dump with "
            'XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"'
        )
    programs = {path: _read_text(path) for path in paths}
    speaking = {path: program for path, program in programs.items() if program.records}
    if len(speaking) > 1:
        names = sorted(speaking, key=lambda path: -speaking[path].wire_bytes)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ValueError(
            f"{folder}: {len(speaking)} programs communicate here, give one of them: "
            f"{', '.join(path.name for path in names[:3])}{more}"
        )
    return next(iter(speaking.values()), programs[paths[0]])


def _read_json(path: Path) -> Program:
    """The program in JSON of shardiff's, called by the file's name."""
    data = inputs.read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get("records"), list):
        raise ValueError(f"{path}: has no records; give an output of shardiff trace, compile or hlo with --json")
    try:
        return replace(Program.from_json(data), label=path.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
