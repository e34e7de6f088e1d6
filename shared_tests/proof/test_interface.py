"""The files of a strategy fit side by side: they have the same names, in the same order, with the same parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import contract.strategy
from contract.axes import ALL_AXES, AXES, AXES_OF_BLOCKS, ON_AXES, STRATEGIES
from contract.strategy import IMPLEMENTATIONS
from shared_tests.definitions import DEFINITIONS, ROOTED, WITH_DIM

SIDES = {"torch": "torch_impl.explicit", "shard_map": "jax_impl.shard_map", "annotated": "jax_impl.annotated"}
PLACES = ("enter", "leave", "attend", "dispatch", "combine")  # in a block of a transformer
FUNCTIONS = (
    "split_params",
    "split_batch",
    "weights",
    "gradients",
    "own",
    "whole",
    "forward",
    *PLACES,
    "execute",
    "total",
)
AS_DATA = {
    "PARAMS_SPEC": "split_params",
    "STACKED": "split_params",
    "BATCH_SPEC": "split_batch",
}  # what JAX has instead
PARAMETERS = {  # of torch; JAX asks the mesh by the name of an axis alone, so it has no `mesh`
    "split_params": ["params", "mesh"],
    "split_batch": ["batch", "mesh"],
    "weights": ["layer", "mesh"],
    "gradients": ["layer", "mesh"],
    "own": ["layer", "mesh"],
    "whole": ["layer", "mesh"],
    "forward": ["params", "x", "mesh"],
    "enter": ["x", "mesh"],
    "leave": ["y", "mesh"],
    "attend": ["q", "k", "v", "local", "mesh"],
    "dispatch": ["h", "mesh"],
    "combine": ["h", "mesh"],
    "total": ["share", "mesh"],
}
NOT_THERE = ("annotated", "ring_attention")  # no annotation derives a ring
every_file = pytest.mark.parametrize(
    ("implementation", "strategy"),
    [(i, s) for i in IMPLEMENTATIONS for s in ON_AXES if (i, s) != NOT_THERE],
    ids=lambda value: value,
)
ROOT = Path(__file__).parents[2]
PACKAGES = {  # package -> what it may not import
    "shardiff": ("contract", "torch_impl", "jax_impl", "benchmarks"),
    "contract": ("torch", "jax", "torch_impl", "jax_impl", "benchmarks"),
    "torch_impl": ("jax", "jax_impl", "benchmarks"),
    "jax_impl": ("torch", "torch_impl", "benchmarks"),
}


def module(implementation, strategy):
    return importlib.import_module(f"{SIDES[implementation]}.{strategy}")


def source(module):
    return ast.parse(Path(module.__file__).read_text())


def test_the_sides_are_the_implementations_and_the_contract_tells_the_names():
    assert tuple(SIDES) == IMPLEMENTATIONS
    assert set(AXES) == {"single_device", *STRATEGIES}
    assert set(ALL_AXES) - {"single_device"} == set(ON_AXES) == {*STRATEGIES, *AXES_OF_BLOCKS}
    for side, package in SIDES.items():
        folder = ROOT / package.replace(".", "/")
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert files == {name for name in ON_AXES if (side, name) != NOT_THERE}, side
    text = " ".join(contract.strategy.__doc__.split())
    places = [text.index(f" {name}(") for name in FUNCTIONS]
    assert places == sorted(places), "the contract tells the names in their order"


@pytest.mark.parametrize("side", ["torch", "shard_map"])
def test_the_places_in_a_block_are_told_where_blocks_are_and_come_in_the_order_in_which_strategies_have_them(side):
    blocks = importlib.import_module({"torch": "torch_impl.blocks", "shard_map": "jax_impl.blocks"}[side])
    signatures = dict(re.findall(r"^ +(\w+)\(([\w, ]+)\)  ", blocks.__doc__, re.MULTILINE))
    assert list(signatures) == list(PLACES)
    for name, parameters in signatures.items():
        assert parameters.split(", ") == parameters_of(name, side), name
    used = {name for strategy in AXES_OF_BLOCKS for name in defined(side, strategy) if name in PLACES}
    assert used == set(PLACES)


def parameters_of(name, side):
    return PARAMETERS[name] if side == "torch" else [p for p in PARAMETERS[name] if p != "mesh"]


def defined(implementation, strategy):
    """The names of a strategy, in the order of its file, as the torch side calls them."""
    names = []
    for node in source(module(implementation, strategy)).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [AS_DATA.get(target.id, target.id) for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if name == "AXIS" or name in FUNCTIONS]


@every_file
def test_the_contract_tells_every_constant_of_a_strategy(implementation, strategy):
    body = source(module(implementation, strategy)).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    constants = {target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()}
    told = set(re.findall(r"\b[A-Z_]{4,}\b", contract.strategy.__doc__))
    assert "AXIS" in constants and constants <= told, constants - told


@every_file
def test_a_strategy_has_its_names_in_order(implementation, strategy):
    names = defined(implementation, strategy)
    assert names == [name for name in ("AXIS", *FUNCTIONS) if name in names]
    if implementation == "annotated":
        assert hasattr(module(implementation, strategy), "RULES")


@pytest.mark.parametrize("strategy", ON_AXES)
def test_what_is_written_in_torch_is_written_under_shard_map(strategy):
    assert defined("torch", strategy) == defined("shard_map", strategy)


@every_file
def test_a_strategy_s_functions_have_the_same_parameters(implementation, strategy):
    here = module(implementation, strategy)
    for name in PARAMETERS:
        if callable(function := getattr(here, name, None)):
            assert list(inspect.signature(function).parameters) == parameters_of(name, implementation), name


@pytest.mark.parametrize("strategy", ON_AXES)
def test_every_strategy_has_all_closed_forms(strategy):
    """A missing one is an error; there is no default formula."""
    parameters = {
        "refusal": ["asked", "n"],
        "rows": ["total", "n"],
        "cut": ["parts", "problem", "n", "index", "unit"],
        "communication": ["share", "n"],
        "kept": ["tensors", "n"],
    }
    here = contract.strategies.of(strategy)
    assert (here.AXIS, here.UNIT >= 1) == (ALL_AXES[strategy], True)
    for name, want in parameters.items():
        assert list(inspect.signature(getattr(here, name)).parameters) == want, name
    with pytest.raises(ModuleNotFoundError):
        contract.strategies.of("magic")


@every_file
def test_a_strategy_names_the_axis_of_the_contract(implementation, strategy):
    assert module(implementation, strategy).AXIS == ALL_AXES[strategy]


@every_file
def test_a_strategy_and_its_public_functions_have_docstrings(implementation, strategy):
    here = source(module(implementation, strategy))
    assert ast.get_docstring(here)
    for node in here.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("strategy", ["data_parallel", "tensor_parallel", "megatron_tensor_parallel", *AXES_OF_BLOCKS])
def test_the_shapes_that_a_strategy_splits_into_are_told_in_the_same_words_on_all_sides(strategy):
    before = r"(?:samples|columns|Even layers|even layers|dd layers|the sequence|s experts|of a block|In a block)"

    def words(implementation):
        text = Path(module(implementation, strategy).__file__).read_text()
        found = re.findall(before + r": *([^.;\n\"]*[^.;\n\" ])", text)
        return frozenset(shape for line in found for shape in re.findall(r"(?:[WXYbv]|up|down)\[[^]]*\]", line))

    shapes = {side: words(side) for side in IMPLEMENTATIONS if (side, strategy) != NOT_THERE}
    assert shapes["torch"] and len(set(shapes.values())) == 1, shapes


def test_the_eight_collectives_are_on_both_sides_with_the_same_parameters():
    extra = {"all_gather": ["dim"], "reduce_scatter": ["dim"]}
    for side, group in (("torch_impl", "group"), ("jax_impl", "axis")):
        here = importlib.import_module(f"{side}.collectives")
        for op in DEFINITIONS:
            parameters = [p for p in inspect.signature(getattr(here, op)).parameters if p != "like"]
            assert parameters == ["x", *(["root"] if op in ROOTED else []), group, *extra.get(op, [])], (side, op)
            assert "=>" in inspect.getdoc(getattr(here, op)), (side, op)  # a picture over the ranks
    assert set(WITH_DIM) == set(extra)


def test_the_eight_collectives_come_in_the_same_order_on_both_sides():
    orders = []
    for side in ("torch_impl", "jax_impl"):
        here = source(importlib.import_module(f"{side}.collectives"))
        orders.append([n.name for n in here.body if isinstance(n, ast.FunctionDef) and n.name in DEFINITIONS])
    assert orders[0] == orders[1] == list(DEFINITIONS)


@pytest.mark.parametrize("side", ["torch_impl", "jax_impl"])
def test_train_has_one_signature(side):
    run = importlib.import_module(f"{side}.train").run
    parameters = inspect.signature(run).parameters
    first, *rest = parameters.values()
    assert first.name == "run" and first.annotation == "Run"
    assert all(p.default is not inspect.Parameter.empty for p in rest)
    assert inspect.signature(run).return_annotation == "RunResult"


def test_every_module_has_a_docstring():
    missing = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(path.read_text())
            if path.stat().st_size and not ast.get_docstring(tree):
                missing.append(str(path.relative_to(ROOT)))
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_names_what_its_package_may_not_import(package):
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top not in PACKAGES[package], (path, name)


def test_contract_imports_neither_torch_nor_jax():
    modules = [f"contract.{path.stem}" for path in (ROOT / "contract").glob("*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "numpy" in loaded and not loaded & {"torch", "jax", "jaxlib", "flax", "optax", "ml_dtypes"}
