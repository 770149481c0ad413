# Every target sets up what it needs: the environment in .venv, made again when setup.py changes.
#
#   make serve      start a server on the model that ships with it    (ARGS="--port 8000 --tp 2", MODEL=path)
#   make test       everything but the GPU tests and those that take long (ARGS="tests/unit -k radix")
#   make test-all   everything but the GPU tests
#   make clients    clients from elsewhere against the real server    (PARTS="current pinned npm on_ray")
#   make lint       ruff, mypy, import-linter, whether docs/options.md and docs/api.md are current, subjects of commits
#   make compile    compile the scheduler anew, after a change of its sources (an installation does it too)
#   make docs       write docs/options.md, docs/api.md and docs/models.md
#   make bench      the benchmarks that a CPU can run
#   make venv       only create the environment, so that a chosen PyTorch can be installed into it first

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: serve test test-all clients lint format compile docs bench venv clean

PYTHON ?= python3
VENV ?= .venv
CACHE ?= .cache
CLIENTS ?= .venv-clients
# The folders of tests/clients: Python packages around the newest openai, those that hold it back, npm packages,
# and Ray, on whose cluster servers are started.
PARTS ?= current pinned npm on_ray
ARGS ?=
# Test files that run at a time. A test keeps about one core busy.
JOBS ?= 2

BIN := $(VENV)/bin
# Always -m: a tool that the environment sees on the host has no script in .venv/bin.
RUN := $(BIN)/python -m
PIP_INSTALL := $(RUN) pip install --quiet --disable-pip-version-check
MODEL ?= tiny
# A host without Chromium leaves the tests of the page out, and says so.
BROWSER ?= $(shell command -v chromium chromium-browser google-chrome google-chrome-stable $(CHROMIUM) | head -n 1)
NO_BROWSER = $(if $(BROWSER),,$(patsubst %,--ignore=%,$(wildcard tests/e2e/test_page_*.py)))

serve: $(VENV)/.installed
	@exec $(RUN) srt.launch_server --model-path $(MODEL) $(ARGS)

test: $(VENV)/.installed-test
	$(if $(BROWSER),,@echo "The page's tests are left out: they need Chromium (apt-get install -y chromium, or CHROMIUM=path)." >&2)
	$(RUN) pytest -n $(JOBS) --dist loadfile $(NO_BROWSER) $(ARGS)

test-all: $(VENV)/.installed-test
	$(if $(BROWSER),,@echo "The page's tests are left out: they need Chromium (apt-get install -y chromium, or CHROMIUM=path)." >&2)
	$(RUN) pytest -n $(JOBS) --dist loadfile -m "not gpu" $(NO_BROWSER) $(ARGS)

clients: $(VENV)/.installed-test $(PARTS:%=$(CLIENTS)/%/.installed)
	$(RUN) tests.clients $(CLIENTS) $(PARTS)

lint: $(VENV)/.installed-dev
	@failed=(); \
	check() { echo "$$@"; "$$@" || failed+=("$$3"); }; \
	check $(RUN) ruff check .; \
	check $(RUN) ruff format --check .; \
	check $(RUN) mypy; \
	check $(RUN) scripts.lint_imports --no-logo; \
	check $(RUN) scripts.document_options --check; \
	check $(RUN) scripts.document_api --check; \
	check $(RUN) scripts.document_models --check; \
	check $(RUN) scripts.check_commits; \
	if (( $${#failed[@]} )); then echo "failed: $${failed[*]}" >&2; exit 1; fi

format: $(VENV)/.installed-dev
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

compile: $(VENV)/.installed-dev
	$(RUN) scripts.compile_scheduler

docs: $(VENV)/.installed
	$(RUN) scripts.document_options
	$(RUN) scripts.document_api
	$(RUN) scripts.document_models

bench: $(VENV)/.installed-test
	$(RUN) benchmarks.startup --model-path $(MODEL)
	$(RUN) benchmarks.scheduler
	$(RUN) benchmarks.frontend

venv: $(BIN)/python

clean:
	rm -rf $(VENV) $(CACHE) $(CLIENTS) build *.egg-info

$(BIN)/python:
	$(PYTHON) scripts/create_venv.py $(VENV)

# A stamp is written after its install succeeded, so an interrupted one is done again.
$(VENV)/.installed: setup.py | $(BIN)/python
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-test: setup.py | $(BIN)/python
	$(PIP_INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: setup.py | $(BIN)/python
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

# requirements.txt lists every package, so pip resolves nothing; and compiles nothing, as most modules are never imported.
# lm-eval's model `hf` runs on the project's PyTorch, and servers on Ray as well: `pinned` and `on_ray` see the packages of .venv,
# after their own.
$(CLIENTS)/%/.installed: tests/clients/%/requirements.txt | $(VENV)/.installed-test
	$(RUN) venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	$(if $(filter pinned on_ray,$*),$(BIN)/python -c "import sys; print(*[path for path in sys.path if path.endswith('-packages')], sep='\n')" \
		> "$$(echo $(@D)/lib/python3*/site-packages)/project.pth")
	@touch $@

$(CLIENTS)/npm/.installed: tests/clients/npm/package.json $(CLIENTS)/current/.installed
	@mkdir -p $(@D)
	cp $< $(@D)
	PATH="$(abspath $(CLIENTS)/current/bin):$$PATH" npm install --prefix $(@D) --no-audit --no-fund --no-package-lock --loglevel error
	@touch $@
