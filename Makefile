# Two commands are enough: `make demo` shows what nearsay does, `make test` shows that it is right.
PYTHON ?= python3
BIN := .venv/bin
FULL ?= .venv-full
# torch pins the CUDA packages itself; naming them here would force them on machines without a GPU.
CUDA_PACKAGES := triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cccl nvidia-cuda-cupti \
  nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver \
  nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header \
  $(CUDA_PACKAGES:%=--no-emit-package %)

.PHONY: help demo test test-slow test-gpu check check-full format benchmark pins clean
help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/core: requirements/core.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"nearsay needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Name another with make PYTHON=...")'
	@echo "Setting up .venv (about a minute the first time) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv  # one that broke off has python, but no pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/core.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/test: .venv/core requirements/test.txt
	@echo "Adding the test tools to .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	@touch $@

$(FULL)/full: requirements/full.txt pyproject.toml
	@echo "Setting up $(FULL) with every extra (7 GB, some minutes the first time) ..."
	@test -x $(FULL)/bin/pip || $(PYTHON) -m venv $(FULL)
	@echo '*' > $(FULL)/.gitignore
	@$(FULL)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/full.txt
	@$(FULL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/core  ## train on noisy labels with and without NCR, and write a report (a minute)
	@$(BIN)/nearsay demo

test: .venv/test  ## run the tests (a few minutes)
	@echo "Running the tests ..."
	@$(BIN)/python -m pytest

test-slow: .venv/test  ## run the slow tests too: mutants, more random examples
	@$(BIN)/python -m pytest -m "slow or not slow"

test-gpu: .venv/test  ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest tests/gpu

check: .venv/test  ## format, lint, types and tests: what must be green
	@echo "ruff format"; $(BIN)/ruff format --check .
	@echo "ruff check"; $(BIN)/ruff check .
	@echo "mypy"; $(BIN)/mypy
	@echo "pytest"; $(BIN)/python -m pytest

check-full: $(FULL)/full  ## all tests beside every library that nearsay works with, none of them skipped
	@echo "Running the tests with every extra ..."
	@$(FULL)/bin/python -m pytest --no-skips

format: .venv/test  ## let ruff rewrite the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

benchmark: .venv/core  ## time and memory of the loss, and images per second of training
	@$(BIN)/python benchmarks/loss.py
	@$(BIN)/python benchmarks/train.py

pins:  ## renew the requirements files (needs uv)
	$(COMPILE) requirements/core.in --output-file requirements/core.txt
	$(COMPILE) requirements/test.in --output-file requirements/test.txt
	$(COMPILE) requirements/full.in --output-file requirements/full.txt

clean:  ## remove what the commands made
	rm -rf .venv .venv-full .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
