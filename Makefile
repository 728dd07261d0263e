# Everything a developer does with Antiphon. `make` alone says what there is.
#
# Each target makes `.venv` and installs into it what it needs; that is quick when neither
# pyproject.toml nor constraints.txt changed. Only pip uses the network.

PYTHON ?=
ARGS ?=
# Two workers more than cores, forked from one process that has imported torch; each collects all tests, so
# more than eight only cost time. The tests of one file stay together, for they share what is slow to make;
# tests/conftest.py orders them. Bytecode is kept, else each process that tests start compiles all that it imports.
PYTEST_WORKERS ?= -n auto --maxprocesses=8 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_RAY := $(VENV)/.installed-ray
EVIDENCE := docs/evidence

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint bench docs docs-pictures dist soak

help:
	@echo 'make setup   make .venv and install Antiphon and its tools into it'
	@echo 'make demo    serve, talk, record and replay a session with the embedded model'
	@echo 'make test    run the tests (ARGS="-m quick" in a minute; ARGS="-k units" for some)'
	@echo 'make lint    check style, formatting and types'
	@echo 'make bench   measure, and print the numbers as JSON'
	@echo 'make docs    build the site of the documentation (ARGS="--repository URL" for links to files)'
	@echo 'make dist    make the packages for Python and npm, in dist/'
	@echo 'make soak    run for long, and keep the numbers under $(EVIDENCE)/'
	@echo 'PYTHON=...   which Python (3.11 or later) makes .venv'

setup: $(INSTALLED)
	@echo "ready: $(BIN)/antiphon"

demo: $(INSTALLED)
	@$(BIN)/antiphon demo $(ARGS)

test: $(INSTALLED)
	@echo 'pytest'
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest $(PYTEST_WORKERS) $(ARGS)

lint: $(INSTALLED)
	@echo 'ruff check'
	@$(BIN)/ruff check .
	@echo 'ruff format --check'
	@$(BIN)/ruff format --check .
	@echo 'codespell'
	@$(BIN)/codespell
	@echo 'mypy'
	@$(BIN)/mypy

bench: $(INSTALLED)
	@$(BIN)/python -m tests.bench.units --json $(ARGS)

docs: $(INSTALLED)
	@$(BIN)/python -m docs.site $(ARGS)

docs-pictures: $(INSTALLED)
	@$(BIN)/python -m tests.browser.pictures
	@$(BIN)/python -m tests.browser.film

# The same sources make the same bytes: every file in a package has the time of the last commit. npm
# is asked for only where it is; its package has no file that is built.
dist: $(INSTALLED)
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || echo 1700000000) \
		$(BIN)/python -m hatchling build -t wheel -t sdist -d dist
	@if command -v npm >/dev/null; then cd runtime/web && npm pack --silent --pack-destination ../../dist; \
		else echo 'there is no npm: no package for JavaScript'; fi

soak: $(WITH_RAY)
	@mkdir -p $(EVIDENCE)
	@$(BIN)/python -m tests.soak.sessions $(ARGS)
	@$(BIN)/python -m tests.soak.server
	@$(BIN)/python -m tests.soak.crash
	@$(BIN)/python -m tests.soak.forged
	@$(BIN)/python -m tests.soak.workers
	@$(BIN)/python -m tests.soak.ray
	@$(BIN)/python -m tests.soak.cuts
	@$(BIN)/python -m tests.soak.restarts
	@$(BIN)/python -m tests.soak.prefixes
	@$(BIN)/python -m tests.soak.sleepers
	@$(BIN)/python -m tests.soak.renames
	@$(BIN)/python -m tests.soak.gateways
	@$(BIN)/python -m tests.soak.clients
	@$(BIN)/python -m tests.soak.assessed
	@$(BIN)/python -m tests.soak.folder
	@$(BIN)/python -m tests.soak.console
	@$(BIN)/python -m tests.soak.view
	@$(BIN)/python -m tests.soak.dataset
	@$(BIN)/python -m tests.soak.install
	@$(BIN)/python -m tests.law
	@$(BIN)/python -m tests.mutants
	@$(BIN)/python -m tests.simulation.simulate --seeds 0-1999 --out $(EVIDENCE)
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest $(PYTEST_WORKERS) -m hypothesis
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest $(PYTEST_WORKERS) -m 'not hypothesis'

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'installing into $(VENV) (minutes the first time)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,docs]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[words]' \
		|| echo 'there is no moonshine for this system: the words of users are not written down'
	@touch $@

$(WITH_RAY): $(INSTALLED)
	@echo 'installing Ray into $(VENV)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev,docs]' --editable ./examples/ray_placement
	@touch $@

$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$python"; \
			"$$python" -m venv --clear $(VENV) && exit 0; \
			rm -rf $(VENV); \
			echo "$$python could not make a virtual environment (is its venv module installed?)" >&2; \
			exit 1; \
		fi; \
	done; \
	echo 'Antiphon needs Python 3.11 or later, and found none.' >&2; \
	echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; \
	exit 1
