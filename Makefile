# make install       create .venv with pinned dependencies
# make demo          fine-tune a tiny model, then train it with PPO (about five minutes on two CPU cores)
#
# make check         format, lint and types
# make test-fast     a contributor's first check, under a minute: algorithms, config, data, batches, one engine
# make test          what CI runs: check, test-main, test-vllm, test-kernels, test-engines and test-tinker, side by side
# make test-nightly  builds of the distributions and of the site, the notebook, the benchmark scripts
# make test-all      make test, test-nightly, test-slow, test-tinker-slow, test-recipes, test-families, test-remote,
#                    test-hub, test-titan, test-megatron(-slow), test-server, test-matrix, test-cluster (hours)
# make test-main     the test suite of the package, without its nightly and slow cases and without optional libraries
# make test-slow     the cases that test-main leaves out: every layout of a run, kills at random moments, more random inputs
# make test-kernels  GPU kernels, in Triton's interpreter and compiler
# make test-vllm     the vLLM rollout, with a CPU build of vLLM
# make test-server   the vLLM server rollout, and slow cases of the vLLM rollout (starts a server per model)
# make test-engines  the oracle step and the bitwise resume of Megatron and torchtitan, on two ranks
# make test-megatron the Megatron engine: the contract in several layouts on CPU ranks, a PPO run, a killed run
# make test-megatron-slow    its other layouts, models and rules (half an hour)
# make test-sglang   the SGLang rollout, on a CPU (slow)
# make test-titan    the torchtitan engine, on a CPU; `make titan` creates its environment
# make test-families    every decoder-only model type of transformers, beside plain transformers
# make test-hub      data sets of the Hugging Face hub, from a local server, and chat templates of published models
# make test-newest   test-fast with the newest transformers and pydantic, in an environment of its own
# make test-agents   programs with the client of OpenAI, verifiers and the trainer of TRL, in environments of their own
# make test-tinker   camshaft serve with the Tinker SDK and recipes of its cookbook, in an environment of its own
# make test-recipes  the recipes of the Tinker cookbook that docs/serve.md lists
# make test-tinker-slow    scripts with the Tinker SDK whose server and workers are killed 20 times (20 minutes)
# make test-newest-sdk     test-tinker and test-recipes with the newest SDK, and the contract of Tinker servers
# make test-page     the page of `camshaft view` in Chromium
# make test-remote   data, models and checkpoints on an S3 server; `make remote` installs client and server
# make test-matrix   the sharded engine: every rule, every layout, every pair of features (hours)
# make test-cluster  Ray: kill -9 of every kind of process, two machines, the launch scripts (half an hour)
# make test-gpu      the sharded engine on CUDA and NCCL, and tests that need an accelerator; installs nothing (docs/gpu.md)
# make gpu-packages  packages for test-gpu and bench-gpu on a machine that has only torch and transformers
#
# make chaos         kill random processes of runs at random moments, and compare them with undisturbed runs (an hour)
# make soak          train four layouts for two hours, and fail if memory, descriptors or files grow
# make fuzz          random configs, damaged checkpoints, data files and model folders (half an hour)
#
# make bench         updates and steps beside hand-written loops (five minutes)
# make bench-trl     GRPO and PPO steps beside TRL (a quarter of an hour); `make trl` creates its environments
# make bench-gpu     MFU, memory, decoding and host waits on one CUDA device (docs/gpu.md)
# make bench-check   fail if a speed ratio fell below the committed one for this kind of processor
#
# make format        apply the formatter and the linter's fixes
# make docs          regenerate the generated pages (config, metrics, command-line, api, engine-features, spec) and tables
# make site          build the documentation site; open it with `make serve-site`
# make clean         remove every environment and cache
#
# Environments (.venv, .venv-vllm, ...) are created when they are missing or when the pinned versions change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_INSTALLED := $(VLLM)/.installed
VLLM_ENGINES := .venv-vllm-engines
VLLM_ENGINES_INSTALLED := $(VLLM_ENGINES)/.installed
TRITON := .venv-triton
TRITON_INSTALLED := $(TRITON)/.installed
SGLANG := .venv-sglang
SGLANG_INSTALLED := $(SGLANG)/.installed
MEGATRON := .venv-megatron
MEGATRON_INSTALLED := $(MEGATRON)/.installed
MEGATRON_TESTS := tests/contracts/test_megatron_contract.py tests/contracts/test_engine_features.py \
	tests/megatron_engine tests/engine_runs
TITAN := .venv-titan
TITAN_INSTALLED := $(TITAN)/.installed
REMOTE := .venv-remote
REMOTE_INSTALLED := $(REMOTE)/.installed
HUB := .venv-hub
HUB_INSTALLED := $(HUB)/.installed
NEWEST := .venv-newest
NEWEST_INSTALLED := $(NEWEST)/.installed
PAGE := .venv-page
PAGE_INSTALLED := $(PAGE)/.installed
AGENTS := .venv-agents
AGENTS_INSTALLED := $(AGENTS)/.installed
VERIFIERS := .venv-verifiers
VERIFIERS_INSTALLED := $(VERIFIERS)/.installed
TINKER := .venv-tinker
TINKER_INSTALLED := $(TINKER)/.installed
NEWEST_SDK := .venv-newest-sdk
NEWEST_SDK_INSTALLED := $(NEWEST_SDK)/.installed
TRL_INSTALLED := .venv-trl/.installed
TRL_PPO_INSTALLED := .venv-trl-ppo/.installed
JOBS ?= 2
# A Python on the machine with the accelerator. It needs torch and transformers, and further packages here or in GPU_PACKAGES.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PYTHON_VERSION ?= 3.12
GPU_PACKAGES := build/gpu-packages
GPU_JOBS ?= 6
GPU_ENV := PYTHONPATH=$(CURDIR):$(CURDIR)/$(GPU_PACKAGES) OMP_NUM_THREADS=1
# Unset: tests start hundreds of Python processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=
ALONE = $(shell grep -rlE --include='test_*.py' 'mark\.alone' tests)
SUITE := not matrix and not vllm and not sglang and not megatron and not titan and not cluster and not interpreted and not compiled and not remote and not page and not hub and not agents and not tinker
# Tests of the CUDA code path on tensors of another device. Where Triton is installed, they take the path of its kernels.
WITH_TRITON := tests/unit/engine/test_no_host_sync.py tests/unit/models/test_logprob_memory.py
NIGHTLY := tests/packaging tests/unit/benchmarks tests/smoke/test_closed_pipe.py tests/smoke/test_notebook.py \
	tests/smoke/test_shadowed.py tests/smoke/test_site.py
FAST = -n $(JOBS) -m "$(SUITE) and not slow and not alone" \
	-k "(not test_engine_contract or reference) and not test_path" \
	tests/architecture tests/unit/algorithms tests/unit/data tests/unit/config/test_schema.py \
	tests/unit/test_dataproto.py tests/unit/test_ragged.py tests/unit/test_digest.py \
	tests/contracts/test_engine_contract.py

.PHONY: demo gpu-packages test test-fast test-all test-main test-unbounded test-alone test-nightly test-slow test-kernels test-vllm test-server test-sglang test-engines test-megatron test-megatron-slow test-titan test-remote test-families test-hub test-newest test-page test-agents test-tinker test-tinker-slow test-recipes test-newest-sdk test-matrix test-cluster test-gpu chaos soak fuzz bench bench-trl bench-gpu bench-check trl megatron titan remote check format docs site serve-site clean install

install: $(INSTALLED)

# torch is installed first, so that no other package pulls in another build of it.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev,plot]'
	touch $(INSTALLED)

# The list is complete and installed without resolving dependencies.
$(VLLM_INSTALLED): pyproject.toml constraints.txt requirements-vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(VLLM)/bin/python -m pip uninstall -q -y triton
	$(VLLM)/bin/python -m pip install -q --no-deps -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(VLLM_INSTALLED)

# Megatron and torchtitan beside vLLM, in a separate folder for the same reason as Triton below.
$(VLLM_ENGINES_INSTALLED): $(VLLM_INSTALLED) requirements-megatron.txt requirements-titan.txt
	$(VLLM)/bin/python -m pip install -q --no-deps --upgrade --target $(VLLM_ENGINES) \
		-c requirements-megatron.txt -c requirements-titan.txt \
		megatron-core torchtitan docstring_parser spmd_types triton typeguard tyro
	touch $(VLLM_ENGINES_INSTALLED)

# In a separate folder: torch imports Triton at start where it is installed, which slows the CPU tests down.
$(TRITON_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(TRITON) triton==3.7.1
	touch $(TRITON_INSTALLED)

# In a separate folder, because the S3 client requires an older version of a package in the environment.
$(REMOTE_INSTALLED): $(INSTALLED) requirements-remote.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(REMOTE) -r requirements-remote.txt
	touch $(REMOTE_INSTALLED)

remote: $(REMOTE_INSTALLED)

$(HUB_INSTALLED): $(INSTALLED) requirements-hub.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(HUB) -r requirements-hub.txt
	touch $(HUB_INSTALLED)

# Without the pinned versions of transformers, pydantic and the packages that they pin themselves.
$(NEWEST_INSTALLED): pyproject.toml constraints.txt
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	grep -viE '^(transformers|tokenizers|huggingface_hub|safetensors|pydantic|pydantic_core)==' constraints.txt \
		> $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt torch==2.13.0
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt setuptools
	$(NEWEST)/bin/python -m pip install -q -c $(NEWEST)/constraints.txt --no-build-isolation -e '.[dev,plot]'
	touch $(NEWEST_INSTALLED)

$(PAGE_INSTALLED): $(INSTALLED) requirements-page.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(PAGE) -r requirements-page.txt
	touch $(PAGE_INSTALLED)

$(AGENTS_INSTALLED): $(INSTALLED) requirements-agents.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(AGENTS) -r requirements-agents.txt
	touch $(AGENTS_INSTALLED)

$(VERIFIERS_INSTALLED): requirements-verifiers.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install -q --no-deps -r requirements-verifiers.txt
	touch $(VERIFIERS_INSTALLED)

$(TINKER_INSTALLED): requirements-tinker.txt
	test -x $(TINKER)/bin/python || $(PYTHON) -m venv $(TINKER)
	$(TINKER)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(TINKER)/bin/python -m pip install -q --no-deps -r requirements-tinker.txt
	touch $(TINKER_INSTALLED)

# A later SDK brings the packages that it requires. The cookbook is installed without those that it requires, because its
# recipes need few of them. torch is pinned.
$(NEWEST_SDK_INSTALLED): requirements-tinker.txt
	test -x $(NEWEST_SDK)/bin/python || $(PYTHON) -m venv $(NEWEST_SDK)
	$(NEWEST_SDK)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(NEWEST_SDK)/bin/python -m pip install -q --no-deps -r requirements-tinker.txt
	$(NEWEST_SDK)/bin/python -m pip freeze | grep '^torch==' > $(NEWEST_SDK)/constraints.txt
	touch $(NEWEST_SDK_INSTALLED)

$(SGLANG_INSTALLED): pyproject.toml constraints.txt requirements-vllm.txt requirements-sglang.txt
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(SGLANG)/bin/python -m pip install -q --no-deps -r requirements-sglang.txt
	$(SGLANG)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(SGLANG_INSTALLED)

$(MEGATRON_INSTALLED): pyproject.toml constraints.txt requirements-megatron.txt
	test -x $(MEGATRON)/bin/python || $(PYTHON) -m venv $(MEGATRON)
	$(MEGATRON)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(MEGATRON)/bin/python -m pip install -q -c constraints.txt setuptools
	$(MEGATRON)/bin/python -m pip install -q --no-deps -r requirements-megatron.txt
	$(MEGATRON)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(MEGATRON_INSTALLED)

megatron: $(MEGATRON_INSTALLED)

# The list is complete, as for vLLM.
$(TITAN_INSTALLED): pyproject.toml constraints.txt requirements-titan.txt
	test -x $(TITAN)/bin/python || $(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(TITAN)/bin/python -m pip install -q -c constraints.txt setuptools
	$(TITAN)/bin/python -m pip install -q --no-deps -r requirements-titan.txt
	$(TITAN)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $(TITAN_INSTALLED)

titan: $(TITAN_INSTALLED)

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

# Three at a time leave no core of two idle; the output of each appears when it ends. The tests that bound a time follow.
# The environments are prerequisites, because two installations at the same time would write to the same egg-info.
test: $(INSTALLED) $(TRITON_INSTALLED) $(VLLM_INSTALLED) $(MEGATRON_INSTALLED) $(TITAN_INSTALLED) $(TINKER_INSTALLED)
	$(MAKE) --jobs=3 --output-sync=target test-unbounded check test-vllm test-kernels test-engines test-tinker
	$(MAKE) test-alone

test-all: test test-nightly test-slow test-tinker-slow test-recipes test-families test-remote test-hub test-titan test-megatron test-megatron-slow test-server test-matrix test-cluster

test-fast: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(FAST)

# Later releases are installed as well.
test-newest: $(NEWEST_INSTALLED)
	$(NEWEST)/bin/python -m pip install -q --upgrade -c $(NEWEST)/constraints.txt transformers pydantic
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(FAST)

test-main:
	$(MAKE) test-unbounded
	$(MAKE) test-alone

test-unbounded: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(SUITE) and not slow and not alone" \
		$(NIGHTLY:%=--ignore=%)

# The tests that bound a time. They mostly wait, so two of them do not delay each other.
test-alone: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "$(SUITE) and not slow and alone" $(filter-out $(NIGHTLY),$(ALONE))

test-nightly: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(SUITE) and not slow" $(NIGHTLY)

test-slow: $(INSTALLED) $(TRITON_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(SUITE) and slow and not alone"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(SUITE) and slow and alone" $(ALONE)
	OMP_NUM_THREADS=1 CAMSHAFT_CONFIG_CASES=200 CAMSHAFT_EXAMPLES=150 CAMSHAFT_REWARD_CASES=200 $(BIN)/python -m pytest \
		-m "$(SUITE) and hypothesis" tests/unit
	OMP_NUM_THREADS=1 CAMSHAFT_WORLDS=2000 $(BIN)/python -m pytest -n $(JOBS) tests/unit/test_foreign_files.py
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "interpreted and slow" tests/kernels

test-kernels: $(TRITON_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
		-m "interpreted and not slow" tests/kernels
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -m "not slow" $(WITH_TRITON)
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "not slow" \
		-k "captured or step_equals" tests/contracts/test_emulated_cuda.py
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest -m compiled tests/kernels

test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM)/bin/python -m pytest -m "vllm and not slow" tests/contracts/test_vllm_contract.py tests/vllm_rollout

test-server: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM)/bin/python -m pytest -m vllm tests/contracts/test_server_contract.py
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		$(VLLM)/bin/python -m pytest -m "vllm and slow" tests/contracts/test_vllm_contract.py tests/vllm_rollout

test-sglang: $(SGLANG_INSTALLED)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
		PYTHONPATH=$(CURDIR)/tests/support/torchvision_without_kernels \
		$(SGLANG)/bin/python -m pytest -m sglang tests/contracts/test_sglang_contract.py tests/sglang_rollout

# The oracle step and the bitwise resume of both engines, in four layouts on two ranks each.
test-engines: $(MEGATRON_INSTALLED) $(TITAN_INSTALLED)
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest -m megatron tests/contracts/test_megatron_contract.py \
		-k "(step_equals_oracle or resume_is_bitwise) and ([tensor- or [pipeline- or [context- or [data_with_distributed_optimizer-)"
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest -m titan tests/contracts/test_torchtitan_contract.py \
		-k "(step_equals_oracle or resume_is_bitwise) and ([two- or [tp2- or [sp2- or [pp2-)"

test-megatron: $(MEGATRON_INSTALLED) $(VLLM_ENGINES_INSTALLED)
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest -m "megatron and not vllm and not slow" $(MEGATRON_TESTS)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHONPATH=$(CURDIR)/$(VLLM_ENGINES) \
		$(VLLM)/bin/python -m pytest -m "megatron and vllm" tests/engine_runs/test_weight_sync.py

test-megatron-slow: $(MEGATRON_INSTALLED)
	OMP_NUM_THREADS=1 $(MEGATRON)/bin/python -m pytest -m "megatron and not vllm and slow" $(MEGATRON_TESTS)

test-titan: $(TITAN_INSTALLED) $(VLLM_ENGINES_INSTALLED)
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest -m "titan and not vllm" tests/contracts/test_torchtitan_contract.py \
		tests/contracts/test_torchtitan_runs.py tests/contracts/test_engine_features.py tests/engine_runs
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHONPATH=$(CURDIR)/$(VLLM_ENGINES) \
		$(VLLM)/bin/python -m pytest -m "titan and vllm" tests/engine_runs/test_weight_sync.py tests/engine_runs/test_exchange.py

# Requires Chromium, for example apt-get install chromium. CAMSHAFT_SCREENSHOTS=folder writes pictures of all views.
test-page: $(PAGE_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(PAGE) $(BIN)/python -m pytest -m page tests/page

test-agents: $(AGENTS_INSTALLED) $(VERIFIERS_INSTALLED) $(TRL_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(AGENTS) $(BIN)/python -m pytest -m agents tests/agent_packages

test-tinker: $(INSTALLED) $(TINKER_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "tinker and not recipes and not slow" tests/tinker_sdk

test-recipes: $(INSTALLED) $(TINKER_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m tinker tests/tinker_sdk/test_recipes.py

test-tinker-slow: $(INSTALLED) $(TINKER_INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "tinker and slow" tests/tinker_sdk

# The comparison of messages, the tests with the SDK, the recipes, and the contract of Tinker servers.
test-newest-sdk: $(INSTALLED) $(NEWEST_SDK_INSTALLED)
	$(NEWEST_SDK)/bin/python -m pip install -q --upgrade -c $(NEWEST_SDK)/constraints.txt tinker
	$(NEWEST_SDK)/bin/python -m pip install -q --upgrade --no-deps tinker_cookbook
	$(NEWEST_SDK)/bin/python -m pip freeze | grep '^tinker'
	OMP_NUM_THREADS=1 CAMSHAFT_TINKER=$(NEWEST_SDK) $(BIN)/python -m pytest -m "tinker and not slow" tests/tinker_sdk \
		&& OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" -k the_server_keeps_rule tests/contracts/test_tinker_contract.py \
		|| { echo "camshaft serve does not support this SDK: see docs/serve.md#newer-sdks"; exit 1; }

test-families: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families --jobs $(JOBS)

test-hub: $(HUB_INSTALLED) $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(HUB) $(BIN)/python -m pytest -m hub tests/hub

test-remote: $(REMOTE_INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=$(REMOTE) $(BIN)/python -m pytest -m "remote or not remote" tests/remote

test-matrix: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m matrix

test-cluster: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "cluster or not cluster" tests/ray_controller tests/contracts/test_controller_contract.py tests/smoke/test_killed_anywhere.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cluster tests/unit/trainer/test_own_rollout.py

# In parallel if pytest-xdist is there.
test-gpu:
	$(GPU_ENV) $(GPU_PYTHON) -m pytest -m gpu tests/gpu \
		$(if $(shell $(GPU_ENV) $(GPU_PYTHON) -c "import xdist" 2>&1),,-n $(GPU_JOBS) --dist worksteal)

# For another machine than this one; its Python has version GPU_PYTHON_VERSION.
gpu-packages:
	$(PYTHON) -m pip install -q --no-deps --upgrade --target $(GPU_PACKAGES) --python-version $(GPU_PYTHON_VERSION) \
		-c constraints.txt hydra-core omegaconf antlr4-python3-runtime pydantic pydantic_core annotated-types \
		typing-inspection typing_extensions cloudpickle rich markdown-it-py mdurl Pygments pytest pytest-timeout \
		pytest-xdist execnet pluggy iniconfig hypothesis sortedcontainers

chaos: $(INSTALLED)
	$(BIN)/python tests/chaos/chaos.py --out benchmarks/results/chaos.md

soak: $(INSTALLED)
	$(BIN)/python tests/chaos/soak.py --out benchmarks/results/soak.md

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/chaos/fuzz.py --out benchmarks/results/fuzz.md

bench: $(INSTALLED)
	$(BIN)/python benchmarks/train_step.py --models 1M,4M --against careful,transformers --rounds 3
	$(BIN)/python benchmarks/ppo_step.py --models 1M --rounds 3

bench-trl: $(INSTALLED) trl
	$(BIN)/python benchmarks/ppo_step.py --models 1M,4M --against careful,trl --rounds 4
	$(BIN)/python benchmarks/critic_step.py --models 1M,4M --against bypass,careful,trl --rounds 4

bench-gpu:
	$(GPU_ENV) $(GPU_PYTHON) benchmarks/gpu.py --out benchmarks/results/gpu

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
	$(BIN)/camshaft engines docs --out docs/engine-features.md
	$(BIN)/python -m tests.families.known
	$(BIN)/python tools/families_page.py
	$(BIN)/python tests/spec/table.py
	$(BIN)/python tools/rule_tables.py
	$(BIN)/python tools/foreign_tables.py
	$(BIN)/python tools/command_line_page.py
	$(BIN)/python tools/api_page.py
	$(BIN)/python tools/grafana_dashboard.py
	$(BIN)/python tools/agent_pages.py

site: $(INSTALLED)
	$(BIN)/python tools/docs_site.py

# Search loads its index with a request, which browsers allow from a server only.
serve-site: site
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs/site 8000

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) $(MEGATRON) $(TITAN) $(TRITON) $(REMOTE) $(HUB) $(NEWEST) $(PAGE) $(AGENTS) $(VERIFIERS) $(TINKER) $(NEWEST_SDK) $(VLLM_ENGINES) .venv-trl .venv-trl-ppo build *.egg-info .pytest_cache .ruff_cache
