# make setup       the environment in .venv
# make quickstart  see it work on this machine
# make check       lint, types and the fast tests, in three minutes
# make test        lint, types, all tests; make test ALL_CASES=1 checks the long lists of cases in full
# make mutants     how many planted bugs the nearest tests find, in about fifteen CPU minutes
# make sglang-cpu  SGLang servers that run without a GPU, for the tests; two versions with ALL_CASES=1
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# With a GPU, whatever CUDA build pip selects.
TORCH  ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
# Without a GPU, the exact versions we test. With one, see docs/install.md.
LOCK   ?= $(if $(findstring ==,$(TORCH)),-c megatron_dapo/locks/cpu.txt)

export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export ALL_CASES
# Hundreds of processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# What `make quickstart` needs, without the tools for development: about 260 MB with a CPU build of torch.
QUICK  := $(VENV)/.installed-to-run

.PHONY: setup quickstart check test parts lint types mutants clean sglang-cpu

setup: $(STAMP)

# The pip that Python 3.11 brings along needs twice the CPU time.
$(STAMP): EXTRAS := [dev]
$(STAMP) $(QUICK): pyproject.toml setup.py
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "$(PYTHON) is missing, or not Python 3.11, 3.12 or 3.13: name another one, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) && { $(BIN)/pip install -qq --disable-pip-version-check -U pip || true; }; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install -qq --disable-pip-version-check $(LOCK) "$(TORCH)"
	@$(BIN)/pip install -qq --disable-pip-version-check $(LOCK) -e '.$(EXTRAS)'
	@touch $@

quickstart: $(if $(wildcard $(STAMP)),$(STAMP),$(QUICK))
	@$(BIN)/python examples/quickstart/quickstart.py

# mypy runs beside the installation of SGLang and the tests. A failure does not end the other parts.
PARALLEL = @$(MAKE) --no-print-directory --keep-going -j

check: lint
	$(PARALLEL) 2 types tests-fast

test: lint
	$(PARALLEL) 2 types parts

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# No server, no Slurm, no training in several processes.
PART_fast := tests/algorithm tests/config tests/data tests/docs tests/rollout tests/simulation tests/planner \
	$(wildcard tests/test_*.py) --ignore=tests/planner/test_against_megatron.py

# Parts of one to three CPU minutes (`pytest --cpu-times`): first those that wait, then the long ones. The last are short, so
# that they end together.
PARTS := sglang launch engines weights selfcheck planner rest policy loop layouts trainer critic docs rollout
# The files that need a real SGLang server share one.
PART_sglang    := $(shell grep -lwE 'sglang_server|server_of_version|two_servers|start_servers' tests/engines/test_*.py)
PART_launch    := tests/launch
PART_engines   := $(filter-out $(PART_sglang),$(wildcard tests/engines/test_*.py))
PART_trainer   := $(wildcard tests/trainer/test_[d-k]*.py)
PART_critic    := $(wildcard tests/trainer/test_[a-c]*.py)
PART_loop      := $(wildcard tests/trainer/test_[l-z]*.py)
PART_policy    := $(wildcard tests/policy/test_[m-z]*.py)
PART_layouts   := $(wildcard tests/policy/test_[a-l]*.py)
PART_docs      := tests/docs
PART_weights   := tests/weights tests/checkpoints
PART_selfcheck := tests/selfcheck tests/examples tests/packaging tests/doctor
PART_rollout   := tests/rollout
PART_planner   := tests/simulation tests/planner
PART_rest      := $(foreach part,$(filter-out rest,$(PARTS)),$(addprefix --ignore=,$(PART_$(part))))

tests-%: $(STAMP)
	@$(BIN)/python -m pytest --durations=40 $(PART_$*)

# Four at a time on two cores, because real servers and Slurm mostly wait. Six would need a twentieth more CPU time.
parts: $(STAMP) sglang-cpu
	@$(BIN)/python -m tests.support.run_parts 4 $(foreach part,$(PARTS),"$(part) $(PART_$(part))")

mutants: $(STAMP)
	@$(BIN)/python -W ignore benchmarks/mutants.py

# SGLang pins other packages than we do, so it has its own environments. They borrow torch and whatever else fits from
# .venv, and the older one borrows from the newer, so that the second costs 20 s and 0.2 GB instead of 2 GB. Triton is the
# one that CUDA builds of torch 2.13 need: for another pip would install a second torch.
SGLANG_FIRST  := .venv-sglang-0.5.23
SGLANG_SECOND := .venv-sglang-0.5.18
SGLANG_NEEDS  := triton==3.7.1 transformers==5.12.1 apache-tvm-ffi==0.1.11 fastapi uvicorn uvloop orjson pyzmq msgspec \
	psutil setproctitle prometheus-client python-multipart pydantic requests aiohttp numpy tqdm pybase64 pillow IPython \
	dill openai==2.6.1 partial_json_parser sentencepiece einops compressed-tensors gguf jsonschema soundfile \
	sglang-router==0.3.2
SGLANG_PIP     = $(BIN)/pip --disable-pip-version-check --python $(@D)/bin/python
SITE           = lib/$$($(BIN)/python -c 'import sys; print(f"python{sys.version_info[0]}.{sys.version_info[1]}")')/site-packages

sglang-cpu: $(SGLANG_FIRST)/.installed $(if $(filter 1,$(ALL_CASES)),$(SGLANG_SECOND)/.installed)

$(SGLANG_FIRST)/.installed: | $(STAMP)
	@echo "installing SGLang for the CPU into $(@D) (a minute or two)"
	@$(BIN)/python -m venv --without-pip $(@D)
	@echo ../../../../$(VENV)/$(SITE) > $(@D)/$(SITE)/borrowed.pth
	@{ $(SGLANG_PIP) install --no-deps sglang==$(subst .venv-sglang-,,$(@D)) xgrammar==0.2.1 && \
	  $(SGLANG_PIP) install $(SGLANG_NEEDS); } > $(@D)/install.log 2>&1 || { cat $(@D)/install.log; exit 1; }
	@touch $@

$(SGLANG_SECOND)/.installed: | $(SGLANG_FIRST)/.installed
	@echo "installing SGLang for the CPU into $(@D)"
	@$(BIN)/python -m venv --without-pip $(@D)
	@for from in $(SGLANG_FIRST) $(VENV); do echo ../../../../$$from/$(SITE); done > $(@D)/$(SITE)/borrowed.pth
	@$(SGLANG_PIP) install --no-deps sglang==$(subst .venv-sglang-,,$(@D)) \
	  > $(@D)/install.log 2>&1 || { cat $(@D)/install.log; exit 1; }
	@touch $@

clean:
	rm -rf $(VENV) .venv-sglang-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
