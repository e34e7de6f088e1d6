"""Three files of one strategy fit side by side: the same names, in the same order, with the same parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from contract.strategy import AXES, IMPLEMENTATIONS, STRATEGIES, Strategy
from shared_tests.definitions import DEFINITIONS, ROOTED, WITH_DIM

SIDES = {"torch": "torch_impl.explicit", "shard_map": "jax_impl.shard_map", "annotated": "jax_impl.annotated"}
FUNCTIONS = {  # name -> parameters
    "split_params": ["params", "mesh", "run"],
    "split_batch": ["batch", "mesh", "run"],
    "loss": ["params", "batch", "mesh", "run"],
    "loss_and_grads": ["params", "batch", "mesh", "run"],
}
every_file = pytest.mark.parametrize(
    ("implementation", "strategy"), [(i, s) for i in IMPLEMENTATIONS for s in AXES], ids=lambda value: value
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


def test_the_sides_are_the_implementations_and_the_contract_names_the_functions():
    assert tuple(SIDES) == IMPLEMENTATIONS
    assert [name for name in vars(Strategy) if name in FUNCTIONS] == list(FUNCTIONS)
    assert set(AXES) == {"single_device", *STRATEGIES}


@every_file
def test_a_strategy_has_its_names_in_order(implementation, strategy):
    names = []
    for node in source(module(implementation, strategy)).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert [name for name in names if name == "AXIS" or name in FUNCTIONS] == ["AXIS", *FUNCTIONS]


@every_file
def test_a_strategy_s_functions_have_the_same_parameters(implementation, strategy):
    here = module(implementation, strategy)
    for name, parameters in FUNCTIONS.items():
        assert list(inspect.signature(getattr(here, name)).parameters) == parameters, name


@every_file
def test_a_strategy_names_the_axis_of_the_contract(implementation, strategy):
    assert module(implementation, strategy).AXIS == AXES[strategy]


@every_file
def test_a_strategy_and_its_public_functions_have_docstrings(implementation, strategy):
    here = source(module(implementation, strategy))
    assert ast.get_docstring(here)
    for node in here.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("strategy", AXES)
def test_the_shapes_in_the_docstrings_of_a_strategy_are_the_same_on_all_sides(strategy):
    def shapes(implementation, function):
        text = inspect.getdoc(getattr(module(implementation, strategy), function))
        return text.splitlines()[0].rstrip(".")

    for function in ("split_params", "split_batch"):
        if strategy == "pipeline_parallel":  # JAX pads and stacks, and says so
            continue
        texts = {i: shapes(i, function).split(":")[-1] for i in IMPLEMENTATIONS}
        assert len(set(texts.values())) == 1, texts


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
