# Everything here works from a fresh clone with Python 3.11 or newer on the PATH.
#
#   PYTHON       the interpreter that makes .venv                 make test PYTHON=python3.12
#   PYTEST_ARGS  more arguments for pytest                        make test PYTEST_ARGS="-k text -x"
#   DEMO_ARGS    more arguments for dflash-graph demo

PYTHON ?= python3
PYTEST_ARGS ?= -n auto
DEMO_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin

# With an NVIDIA GPU pip chooses torch freely; without one the version is pinned, see constraints.txt.
HAS_GPU = $(shell nvidia-smi -L 2>/dev/null | grep -m1 -o '^GPU')
CONSTRAINTS = $(if $(HAS_GPU),,--constraint constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format kernels wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.stamp-base ## install into .venv and run the demo
	$(BIN)/dflash-graph demo $(DEMO_ARGS)

test: $(VENV)/.stamp-test ## install into .venv and run the tests
	$(BIN)/pytest $(PYTEST_ARGS)

# mypy does not see that ops/, templates/ and profiles/ live below dflash_graph, so it gets a tree of links.
lint: $(VENV)/.stamp-lint ## ruff check, ruff format --check and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types
	mkdir -p build/types
	cp -rs "$(CURDIR)/dflash_graph" build/types/
	cp -rs "$(CURDIR)/ops" "$(CURDIR)/templates" "$(CURDIR)/profiles" build/types/dflash_graph/
	MYPYPATH=build/types $(BIN)/mypy -p dflash_graph

format: $(VENV)/.stamp-lint ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Needs no GPU. Triton keeps what it compiled, so a second run only compiles what changed. Eight bytes of spills
# are let through: the register allocation that triton 3.9 asks of ptxas keeps one register in local memory
# across the loop of some products, one store and one load a thread; without that flag they have none.
kernels: $(VENV)/.stamp-triton ## compile every kernel ahead of time for sm_80, sm_90 and sm_120
	TRITON_CACHE_DIR=build/kernels/triton $(BIN)/python -m dflash_graph.ahead_of_time \
	  --cache build/kernels --max-spill-bytes 8

# build/lib would carry files of an earlier build into the wheel.
wheel: $(VENV)/.stamp-venv ## build a wheel in dist/
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An existing .venv that has pip is used as it is; a half-made one is made again.
$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is missing or older than Python 3.11; run make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@touch $@

# .stamp-base: the package alone; .stamp-test, .stamp-lint, .stamp-triton: with the extra of that name. Installed
# anew only when pyproject.toml or constraints.txt changes: the install is editable.
$(VENV)/.stamp-%: pyproject.toml constraints.txt | $(VENV)/.stamp-venv
	@echo "Installing into $(VENV) (PyTorch is a large download the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check $(CONSTRAINTS) --editable '.$(if $(filter-out base,$*),[$*])'
	@touch $@
