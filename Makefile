# kvd: `make demo` and `make test` work on a fresh clone with python3 (3.11 or later), its venv module, and make.
# PYTHON=/path/to/python3.12 make test   chooses the interpreter of a new .venv.
# Works with make 3.81 (macOS): no features of later versions.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two workers keep two cores busy; whoever is done takes of what the other has left.
PYTEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal
STAMP  := $(VENV)/.installed

# Hundreds of children import kvd, and pytest rewrites the assertions of 250 files: both are done once and kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long torture check lint types suite format bench browser-deps browser-deps-begin clean

help:
	@echo "make demo    install into .venv and show an agent's context surviving kill -9"
	@echo "make test    everything CI runs; as root on Debian it installs Chromium by apt (browser-deps)"
	@echo "make test-long  the tests that take minutes"
	@echo "make torture kill -9 by the hundred under load, flipped bits by the thousand; about half an hour"
	@echo "make check   format, lint, types, layers, documentation, file sizes"
	@echo "make format  rewrite the sources as 'make check' wants them"
	@echo "make bench   the tables of figures in the README, and its figures of several agents; takes long"
	@echo "make browser-deps  Chromium for the tests of the page: by apt, as root, on Debian; else says why not"
	@echo "make clean   remove .venv and every generated file"

# The stamp is written last, so an interrupted install starts afresh; it depends on pyproject.toml, so a changed
# dependency is installed by the next call. Byte code is made of the modules that are used, when they are: compiling all
# that is installed is nearly half of an install.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "kvd needs Python 3.11 or later: PYTHON=/path/to/python make ..." >&2; exit 1; }
	@echo "installing into $(VENV) with $(PYTHON) (one time, 0.7 GB on disk)"
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo "cannot make a venv; on Debian: apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/kvd demo

# What 'make check' looks at, its tests among all others. mypy keeps one core busy for a minute: pytest goes on beside it.
# The browser of some tests is installed meanwhile; those tests wait for it, and say so when there is none.
test: browser-deps-begin lint
	@$(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) -j 2 types suite

suite: $(STAMP)
	$(PYTEST) -rs

browser-deps:
	@sh tools/browser_deps.sh $(VENV)/.browser-deps

browser-deps-begin: $(STAMP)
	@echo "looking for a browser in the background; as root on Debian, Chromium is installed by apt"
	@sh tools/browser_deps.sh $(VENV)/.browser-deps </dev/null >/dev/null 2>&1 &

test-long: $(STAMP)
	$(BIN)/python -m pytest -m long
	KVD_TEST_EXAMPLES=search $(BIN)/python -m pytest tests/property

torture: $(STAMP)
	$(BIN)/python -m tests.torture --kills 200 --flips 1000 --races 20
	$(BIN)/python -m pytest tests/faults

check: lint types
	$(BIN)/python -m pytest tests/test_layers.py tests/test_docs.py tests/test_public_surface.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tools/check_size.py

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/kvd bench attention --tokens 1024,4096,7168 --repeats 1
	$(BIN)/kvd bench ttft --tokens 1024,4096
	$(BIN)/kvd bench ttft --tokens 7168 --repeats 1
	$(BIN)/kvd bench ppl --formats q4,q4c,k8v4,q8,q2
	$(BIN)/kvd bench serve --repeats 1

clean:
	rm -rf $(VENV) build dist client/build client/dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf kvd.egg-info client/*.egg-info
	find kvd client tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
