# Each target makes the environment it needs in .venv; a second run finds it ready.
#   make demo PYTHON=python3.12      another interpreter, for a new .venv
#   make test JOBS=0                 all tests in one process
#   make test ARGS='-k wait -x'      extra arguments for pytest (or for the demo or the benchmark)

PYTHON ?= python3
ARGS ?=
# Test processes side by side; 0 runs all in one, for --pdb.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

# Two installations in one environment: what the demo needs, and the rest for developers.
DEMO := $(VENV)/.demo-installed
DEV := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu lint format bench clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(DEMO) ## Train a classifier on four workers and write a report
	$(BIN)/python examples/train_framework_demo.py classification $(ARGS)

test: $(DEV) ## Run the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

test-slow: $(DEV) ## Run the tests marked slow
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(DEV) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(DEV) ## Check style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## Rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV) ## Compare the engines with each other, Ray included
	$(BIN)/python benchmarks/engine.py $(ARGS)

clean: ## Remove the environment, caches and build results (runs/ is kept)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing miniray and torch into $(VENV)"
	$(PIP_INSTALL) -e '.[examples]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing miniray and what its tests need into $(VENV) (torch and Ray are large)"
	$(PIP_INSTALL) -e '.[torch,data,ray,rl,dashboard,examples,dev]'
	@touch $(DEMO) $@
