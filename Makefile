# Two commands do all set-up: `make serve` to use Quire, `make test` to work on it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip compiles with one process what compileall does with all; a file or two are for newer Pythons.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
# The CPU kernels, for a quick first start; without a C compiler they are done without.
NATIVE := $(BIN)/python -m quire.native.build
# One thread a process: several test processes that spin on two cores starve each other.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: serve test check fix clean

# The default model and the page on http://127.0.0.1:8000; for example
#   make serve ARGS="--port 9000 --api-key secret"
serve: $(VENV)/.core
	@$(BIN)/quire pull default
	@exec $(BIN)/quire serve $(ARGS)

test: $(VENV)/.test
	@$(BIN)/quire pull default
	$(TEST_ENV) $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fix: $(VENV)/.check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[serve]"
	@$(COMPILE)
	@$(NATIVE)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[test]"
	@$(COMPILE)
	@$(NATIVE)
	@touch $@ $(VENV)/.core

$(VENV)/.check: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e ".[test,check]"
	@$(COMPILE)
	@$(NATIVE)
	@touch $@ $(VENV)/.core $(VENV)/.test
