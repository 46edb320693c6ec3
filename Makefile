# Each target creates the environment it needs in .venv and reuses it in the next run.
#   make demo PYTHON=python3.12      use a different interpreter for a new .venv
#   make test JOBS=0                 run all tests in one process
#   make test ARGS='-k wait -x'      pass arguments to pytest, the demo or the benchmark

PYTHON ?= python3
ARGS ?=
# Number of test processes. Tests wait for a third of their time, so two cores run three. With 0, all
# tests run in one process, as --pdb requires.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

# Tests start hundreds of interpreters. Without bytecode, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Markers of what is installed in .venv: the demo needs less than the tests.
DEMO := $(VENV)/.demo-installed
DEV := $(VENV)/.dev-installed
DOCS := $(VENV)/.docs-installed
BENCH := $(VENV)/.bench-installed
CHROMIUM := $(VENV)/.chromium-looked-for

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu soak lint format docs bench clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(DEMO) ## Train an image classifier on four workers and write a report
	$(BIN)/python examples/train_framework_demo.py classification $(ARGS)
	@echo "Next:   source $(BIN)/activate, then run miniray dashboard or miniray demo --list"

test: $(DEV) $(CHROMIUM) ## Run the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-slow: $(DEV) $(DOCS) $(CHROMIUM) ## Run the tests marked slow
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(DEV) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

soak: $(DEV) ## Inject faults into a training run for 30 minutes
	$(BIN)/python -m tests.soak $(ARGS)

lint: $(DEV) ## Check style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m slow tests/typing/test_checkers.py::test_mypy
	$(BIN)/lint-imports

format: $(DEV) ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS) ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(BENCH) ## Run all benchmarks beside the peers and write docs/benchmarks.md
	$(BIN)/python benchmarks/all.py --peers $(ARGS)

clean: ## Remove the environment, caches and build results, but not runs/
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing miniray and torch into $(VENV)"
	$(PIP_INSTALL) -e '.[examples,dashboard]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing miniray and its test dependencies into $(VENV) (torch and Ray are large)"
	$(PIP_INSTALL) -e '.[torch,data,ray,rl,dashboard,examples,dev]'
	@touch $(DEMO) $@

$(DOCS): $(DEV)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(BENCH): $(DEV)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

# Tests of the dashboard use a real browser. Without one, they are skipped.
$(CHROMIUM): | $(BIN)/python
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing Chromium for the tests of the dashboard"; \
	    apt-get -o DPkg::Lock::Timeout=300 update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
	        --no-install-recommends chromium fonts-dejavu-core >/dev/null \
	    || echo "Can't install Chromium. Tests of the dashboard will be skipped."; \
	else echo "Chromium not found. Tests of the dashboard will be skipped (apt-get install chromium)."; fi
	@touch $@
