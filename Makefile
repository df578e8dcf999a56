# Needs python3 (3.11 or newer) with venv and pip, and make. Each target sets up .venv by itself, once.
#   make run     train, serve and question a small model       make test   unit tests
#   make check   lint, format, types                           make soak   long tests and the demo
# Options for pip go in PIP_ARGS, for example  make test PIP_ARGS="--index-url https://my.mirror/simple"

PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt
# Without an NVIDIA GPU the CPU build of torch will do; it is a tenth of the default download.
CPU_TORCH := https://download.pytorch.org/whl/cpu

.PHONY: run test check soak

run: .venv/.ready-demo
	$(BIN)/glm5 demo

test: .venv/.ready-dev
	$(BIN)/python -m pytest -m "not slow and not gpu"

check: .venv/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

soak: .venv/.ready-dev
	$(BIN)/python -m pytest -m "slow and not gpu"
	out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(BIN)/glm5 demo --out "$$out/demo"

.venv/.ready-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glm5 needs Python 3.11 or newer; try  make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@if test -z "$(PIP_ARGS)" && ! command -v nvidia-smi >/dev/null && \
		$(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(CPU_TORCH)/torch/", timeout=5)' 2>/dev/null; \
		then set -x; $(PIP) --extra-index-url $(CPU_TORCH) torch; else set -x; $(PIP) torch; fi
	touch $@

.venv/.ready-%: .venv/.ready-torch pyproject.toml
	$(PIP) --editable '.[$*]'
	touch $@
