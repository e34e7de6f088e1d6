# On a fresh machine `make demo` or `make test` alone is enough: every target that needs .venv makes it first.
# CONTRIBUTING.md describes the targets. PYTHON and EXTRAS choose the interpreter and what is installed.
PYTHON ?= python3
EXTRAS ?= compilers,dev
BIN := .venv/bin
STAMP := .venv/.installed-$(EXTRAS)

# Commands start many Pythons, and each would compile this project's files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test coverage faults fuzz long realprograms traces gpu wheels plan lint format mutants mutation \
	clean

install: $(STAMP)
	@:

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("shardiff needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
	@echo "Installing shardiff[$(EXTRAS)] into .venv (a few minutes the first time)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: install
	@$(BIN)/shardiff check
	@$(BIN)/shardiff check --model transformer --layers 2 --degree 2 \
		--strategy sequence_parallel --strategy ring_attention --strategy expert_parallel
	@$(BIN)/shardiff report --quick

test: install
	@$(BIN)/python -m pytest -n auto --maxprocesses 8

coverage: install
	@$(BIN)/python -m shared_tests.meta.covered

faults: install
	@$(BIN)/python -m shared_tests.tool.faults

fuzz: install
	@$(BIN)/python -m shared_tests.tool.fuzz

long: install
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 -m long
	@$(BIN)/python -m shared_tests.proof.long_runs
	@$(BIN)/python -m shared_tests.proof.spellings
	@$(BIN)/python -m shared_tests.proof.sweep

realprograms: install
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[realprograms]"
	@$(BIN)/python -m shared_tests.tool.realprograms

traces: install
	@$(BIN)/python -m shared_tests.tool.traced_often

# With the python that is there, and no network: DEVICE=cpu rehearses it, WHEELS=DIR holds packages that are missing.
DEVICE ?= cuda
gpu:
	@$(PYTHON) -m benchmarks.gpu --device $(DEVICE) $(if $(WHEELS),--wheels $(WHEELS))

wheels:
	@$(PYTHON) -m benchmarks.gpu.wheels $(or $(WHEELS),$(error give a folder: make wheels WHEELS=DIR))

# The proof of the planner over links of stated rates, in network namespaces; leave the machine alone meanwhile. The
# tables of docs/plan.md are filled from the newest results of each kind in benchmarks/results.
OF_TODAY = $(shell date +%Y-%m-%d)_$(1)_$(shell nproc)_cores.json
plan: install
	@$(BIN)/shardiff plan --prove --iterations 2 --output benchmarks/results/$(call OF_TODAY,plan_paced)
	@$(BIN)/shardiff plan --prove --real --output benchmarks/results/$(call OF_TODAY,plan_real)
	@$(BIN)/shardiff plan --prove --claims --output benchmarks/results/$(call OF_TODAY,plan_claims)
	@$(BIN)/shardiff bench collectives --wire --max 1MiB --output benchmarks/results/$(call OF_TODAY,wire)
	@$(BIN)/python -m benchmarks.plan.prove.page

mutants: install
	@$(BIN)/python -m shared_tests.meta.mutants

mutation: install
	@$(BIN)/python -m shared_tests.meta.mutation --anew

lint: install
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports

format: install
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean:
	rm -rf .venv build mutants *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache
