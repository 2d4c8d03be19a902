# `make` alone lists the targets.
#
# PYTHON   the Python 3.11 that .venv is made with
# WORKERS  test processes (default: one a core, at most 8)

PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell n=$(CORES); [ $$n -le 8 ] || n=8; echo $$n)
PYTEST_ARGS ?=

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# TensorFlow's start-up notes about CPU features and missing GPUs.
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | \
	  while IFS=$$'\t' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

.PHONY: demo
demo: setup ## Install, then train privately on handwritten digits (examples/quickstart.py)
	@$(PY) examples/quickstart.py

.PHONY: test
test: setup ## Install, then run all tests and the docstring examples
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# What compares optimizers, engines, replicas and noise takes the devices that it finds.
GPU_TESTS := $(addprefix tests/,$(addsuffix _test.py, optimizer_contract \
  optimizer_training_contract engines bookkeeping bookkeeping_models \
  bookkeeping_queries bookkeeping_devices distribution prng gaussian_noise golden))

.PHONY: test-gpu
test-gpu: setup ## Run the contract and equality tests on the GPUs of this machine
	@bash .ci/check_gpu "$(PY)"
	@$(PY) -m pytest $(GPU_TESTS) $(PYTEST_ARGS)

.PHONY: examples
examples: setup ## Run every example at a small size
	@for file in examples/[!_]*.py; do \
	  echo "--- $$file --smoke"; $(PY) "$$file" --smoke; \
	done

.PHONY: lint
lint: setup ## Check style, formatting and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

.PHONY: format
format: setup ## Format the code and sort the imports
	@$(PY) -m ruff check --select I,UP --fix .
	@$(PY) -m ruff format .

.PHONY: build-file
build-file: setup ## Write BUILD anew from the imports
	@$(PY) .ci/make_build.py

.PHONY: lock
lock: check-python ## Resolve the dependencies anew into requirements-dev.lock
	@bash .ci/lock "$(PYTHON)"

.PHONY: clean
clean: ## Remove .venv, caches and outputs
	@rm -rf $(VENV) build dist outputs *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Setting up: again when the lock file or the package's metadata has changed. A
# PYTHON that was named is checked even if .venv is up to date.
.PHONY: setup
setup: $(if $(filter file,$(origin PYTHON)),,check-python) $(STAMP) ## Make .venv with the locked dependencies

.PHONY: check-python
check-python:
	@bash .ci/check_python "$(PYTHON)"

$(STAMP): requirements-dev.lock pyproject.toml
	@bash .ci/check_python "$(PYTHON)"
	@bash .ci/setup "$(PYTHON)" "$(VENV)"
	@touch $@
