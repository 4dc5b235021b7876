# make demo    warm up a tiny model, then train it with PPO (about five minutes on two CPU cores)
# make test    every check that needs no accelerator
# make test-matrix   the sharded engine: every rule of the contract, every layout, every pair of features (an hour)
# make test-gpu      the contract of the sharded engine on CUDA and NCCL, and what only an accelerator shows
# make check   format, lint, types
# `.venv` is made when it is missing or when the pinned versions change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-matrix test-gpu check format docs clean install

install: $(INSTALLED)

# torch comes first and alone: with it in place nothing else pulls in another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,plot]'
	touch $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python examples/arithmetic/demo.py

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-matrix: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m matrix

test-gpu: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/camshaft config docs --out docs/config.md

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
