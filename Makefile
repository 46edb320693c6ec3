# Each target makes the environment it needs in .venv; a second run finds it ready.
#   make demo PYTHON=python3.12      another interpreter, for a new .venv
#   make test JOBS=0                 all tests in one process
#   make test ARGS='-k wait -x'      extra arguments for pytest (or for the demo or the benchmark)

PYTHON ?= python3
ARGS ?=
# Test processes side by side, for two cores: they wait for a third of their time. 0 runs all tests
# in one, for --pdb.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet -c constraints.txt

# Tests start hundreds of interpreters: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Two installations in one environment: what the demo needs, and the rest for developers.
DEMO := $(VENV)/.demo-installed
DEV := $(VENV)/.dev-installed
DOCS := $(VENV)/.docs-installed
BENCH := $(VENV)/.bench-installed
CHROMIUM := $(VENV)/.chromium-looked-for

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu soak lint format docs bench clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

demo: $(DEMO) ## Train a classifier on four workers and write a report
	$(BIN)/python examples/train_framework_demo.py classification $(ARGS)
	@echo "next:   source $(BIN)/activate, then miniray dashboard, or miniray demo --list"

test: $(DEV) $(CHROMIUM) ## Run the test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-slow: $(DEV) $(DOCS) $(CHROMIUM) ## Run the tests marked slow
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(DEV) ## Run the tests that need a GPU
	$(BIN)/python -m pytest -m gpu $(ARGS)

soak: $(DEV) ## Train for 30 minutes while everything is killed, stopped and slowed
	$(BIN)/python -m tests.soak $(ARGS)

lint: $(DEV) ## Check style, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## Rewrite the code in the project's style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS) ## Build the documentation site into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(BENCH) ## Run all benchmarks with their peers and write docs/benchmarks.md
	$(BIN)/python benchmarks/all.py --peers $(ARGS)

clean: ## Remove the environment, caches and build results (runs/ is kept)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing miniray and torch into $(VENV)"
	$(PIP_INSTALL) -e '.[examples,dashboard]'
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing miniray and what its tests need into $(VENV) (torch and Ray are large)"
	$(PIP_INSTALL) -e '.[torch,data,ray,rl,dashboard,examples,dev]'
	@touch $(DEMO) $@

$(DOCS): $(DEV)
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(BENCH): $(DEV)
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

# The dashboard's page is tested in a real browser; without one those tests skip and say so.
$(CHROMIUM): | $(BIN)/python
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing Chromium for the tests of the dashboard"; \
	    apt-get -o DPkg::Lock::Timeout=300 update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq \
	        --no-install-recommends chromium fonts-dejavu-core >/dev/null \
	    || echo "Chromium could not be installed: the tests of the dashboard's page will skip"; \
	else echo "no Chromium: the tests of the dashboard's page will skip (apt-get install chromium)"; fi
	@touch $@
