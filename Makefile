# make setup       the environment in .venv (CPU torch where there is no NVIDIA GPU)
# make quickstart  see it work on this machine
# make test        lint, types, tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The CPU build by an exact pin; with a GPU, whatever CUDA build pip selects.
TORCH  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.PHONY: setup quickstart test lint types unit clean

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -qq --disable-pip-version-check "$(TORCH)"
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

quickstart: $(STAMP)
	@$(BIN)/megatron-dapo selfcheck layouts --layouts tp2pp2

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
