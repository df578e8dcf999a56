# Needs python3 (3.11 or newer) with venv and pip, and make. Each target sets up .venv by itself, once.
#   make run     train, serve and question a small model       make test   unit tests
#   make check   lint, format, types                           make soak   tests of half a minute each
#   make numerics   tests with tolerances under other instruction sets
#   make long    hours: the longest tests, and all numerics under every instruction set; by hand, before a release
#   make screenshots   the pictures of the pages in docs, which needs Chromium
# Options for pip go in PIP_ARGS: a mirror, or PyTorch's index of CPU builds, a tenth of the default download.

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt

# A file's tests share fixtures; two files at a time.
PARALLEL := -n 2 --dist loadfile

.PHONY: run test check numerics soak long screenshots

run: .venv/.ready-demo
	$(BIN)/glm5 demo --kept-model models/mini

test: .venv/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not long and not gpu" -o faulthandler_timeout=240

check: .venv/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

soak: .venv/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not long and not gpu"

numerics: .venv/.ready-dev
	$(BIN)/python -m tests.instruction_sets --ci

long: .venv/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not gpu"
	SOAK_SECONDS=600 $(BIN)/python -m pytest tests/soak/test_server_load.py
	$(BIN)/python -m tests.instruction_sets

screenshots: .venv/.ready-dev
	$(BIN)/python -m tests.browser.screenshots docs/images

.venv/.ready-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glm5 needs Python 3.11 or newer; try  make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	touch $@

.venv/.ready-%: .venv/.ready-torch pyproject.toml
	$(PIP) --editable '.[$*]'
	touch $@
