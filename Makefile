# Every target sets up what it needs in .venv; a second call does not reinstall.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install demo test lint types unit format bench docs clean

help:
	@echo "make demo   train CartPole with two workers"
	@echo "make test   lint, types and tests"
	@echo "make bench  measure pushes"
	@echo "make docs   the documentation as a site, in build/site"
	@echo "also: install, lint, types, unit, format, clean"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/lightning-weightsync configs/cartpole_ppo.yaml

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.push

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) dist build outputs multirun lightning_logs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
