# make demo    warm up a tiny model, then train it with PPO (about five minutes on two CPU cores)
# make test    every check that needs no accelerator: check, test-main, test-kernels, test-vllm
# make test-main     everything that needs no library beyond the package's own
# make test-kernels  the kernels for GPUs, run by Triton's interpreter, and compiled
# make test-vllm     the vLLM rollout, in an environment that has vLLM for CPUs
# make test-server   the contract of the vLLM server rollout, in the same environment (a server for each model: slow)
# make test-sglang   the SGLang rollout, in an environment that has SGLang, on a CPU (slow, and in no other target)
# make test-matrix   the sharded engine: every rule of the contract, every layout, every pair of features (hours)
# make test-cluster  Ray at length: kill -9 of each kind of process, twenty times; two machines; the scripts (half an hour)
# make test-gpu      the contract of the sharded engine on CUDA and NCCL, and what only an accelerator shows
# make bench         updates and whole steps beside a careful loop by hand and the textbook loop (some five minutes)
# make bench-trl     whole steps of GRPO and of PPO with a critic beside TRL's and a careful loop (a quarter of an hour)
# make trl           the two environments with TRL that bench-trl needs
# make bench-gpu     MFU, memory, decoding and host waits on one CUDA device (some minutes; docs/gpu.md)
# make bench-check   fails where a ratio of these fell by more than a margin below the committed one
# make check   format, lint, types
# `.venv`, and `.venv-vllm`, `.venv-sglang`, `.venv-triton` and `.venv-trl` beside it, are made when they are missing or when the pinned versions change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
TRITON := .venv-triton
TRITON_INSTALLED := $(TRITON)/.installed
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed
TRL_INSTALLED := .venv-trl/.installed
TRL_PPO_INSTALLED := .venv-trl-ppo/.installed
JOBS ?= 2
# Empty is unset: tests start hundreds of Python processes, each of which would compile this package anew.
export PYTHONDONTWRITEBYTECODE :=
HERE := not matrix and not vllm and not sglang and not cluster and not interpreted and not compiled

.PHONY: demo test test-main test-kernels test-vllm test-server test-sglang test-matrix test-cluster test-gpu bench bench-trl bench-gpu bench-check trl check format docs clean install

install: $(INSTALLED)

# torch comes first and alone: with it in place nothing else pulls in another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,plot]'
	touch $(INSTALLED)

# The list is complete, so nothing is resolved and nothing that breaks vLLM comes along; it says what, and why.
$(VLLM_INSTALLED): pyproject.toml constraints.txt requirements-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall -q -y triton
	$(VLLM)/bin/python -m pip install -q --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(VLLM_INSTALLED)

# A folder beside the environment: torch imports Triton at each start where it finds it, and most tests are for CPUs.
$(TRITON_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(TRITON) triton==3.7.1
	touch $(TRITON_INSTALLED)

$(SGLANG_INSTALLED): pyproject.toml constraints.txt requirements-vllm.txt requirements-sglang.txt
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(SGLANG)/bin/python -m pip install -q --no-deps -r requirements-sglang.txt
	$(SGLANG)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(SGLANG_INSTALLED)

$(TRL_INSTALLED): TRL_VERSION := 1.16.0
$(TRL_PPO_INSTALLED): TRL_VERSION := 1.12.0
$(TRL_INSTALLED) $(TRL_PPO_INSTALLED): constraints.txt requirements-trl.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(@D)/bin/python -m pip install -q --no-deps -r requirements-trl.txt trl==$(TRL_VERSION)
	touch $@

trl: $(TRL_INSTALLED) $(TRL_PPO_INSTALLED)

demo: $(INSTALLED)
	$(BIN)/python examples/arithmetic/demo.py

test: check test-main test-kernels test-vllm

# On two cores: two tests at a time, and then those that bound a time, one by one.
test-main: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(HERE) and not alone"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(HERE) and alone"

test-kernels: $(TRITON_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpreted tests/kernels
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -m compiled tests/kernels

test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM)/bin/python -m pytest -m vllm tests/contracts/test_vllm_contract.py tests/vllm_rollout

test-server: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM)/bin/python -m pytest -m vllm tests/contracts/test_server_contract.py

test-sglang: $(SGLANG_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		PYTHONPATH=$(CURDIR)/tests/support/torchvision_without_kernels \
		$(SGLANG)/bin/python -m pytest -m sglang tests/contracts/test_sglang_contract.py tests/sglang_rollout

test-matrix: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m matrix

test-cluster: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "cluster or not cluster" tests/ray_controller tests/contracts/test_controller_contract.py tests/smoke/test_killed_anywhere.py

test-gpu: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu

bench: $(INSTALLED)
	$(BIN)/python benchmarks/train_step.py --models 1M,4M --against careful,transformers --rounds 3
	$(BIN)/python benchmarks/ppo_step.py --models 1M --rounds 3

bench-trl: $(INSTALLED) trl
	$(BIN)/python benchmarks/ppo_step.py --models 1M,4M --against careful,trl --rounds 4
	$(BIN)/python benchmarks/critic_step.py --models 1M,4M --against bypass,careful,trl --rounds 4

bench-gpu: $(INSTALLED)
	$(BIN)/python benchmarks/gpu.py --out benchmarks/results/gpu

bench-check: $(INSTALLED)
	$(BIN)/python benchmarks/check.py

check: $(INSTALLED) $(TRITON_INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/camshaft config docs --out docs/config.md
	$(BIN)/camshaft metrics docs --out docs/metrics.md
	$(BIN)/python tests/spec/table.py

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(TRITON) .venv-trl .venv-trl-ppo build *.egg-info .pytest_cache .ruff_cache
