# Works with GNU make 3.81, which is what macOS carries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint types units clean

help:
	@echo "make demo    set up $(VENV) and run the whole loop on MovieLens-1M"
	@echo "make test    set up $(VENV), then lint, types and tests"
	@echo "make clean   remove $(VENV), caches and the folder of the demo"

demo: $(VENV)/installed
	$(BIN)/semel demo

# Types are checked beside the tests: it takes one core a minute.
test: lint
	@$(MAKE) --no-print-directory -j 2 types units

# A process a core; each computes with one thread, or they would wait for each other. Each has a part of the files, in
# order, so that what a file sets up is set up once; one that is done takes over half of what another still has.
units: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --dist worksteal

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

$(BIN)/pip:  # the last thing that venv makes, so that a broken attempt is made again
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Semel needs Python 3.11 or newer; $(PYTHON) is %d.%d: make PYTHON=python3.12" % v[:2] or 0)'
	@echo "making $(VENV), and installing into it: some minutes where torch must be fetched"
	$(PYTHON) -m venv $(VENV)

# A stamp for each kind of installation: a second run finds it and starts at once.
$(VENV)/installed: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e .
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info semel-demo
	find semel tests -name __pycache__ -type d -prune -exec rm -rf {} +
