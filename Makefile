# A fresh clone needs Python and make: the first target creates .venv, and a change of
# pyproject.toml brings it up to date.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test lint docs demo bench clean

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(INSTALLED)
	$(BIN)/keras-multigpu demo

bench: $(INSTALLED)
	@set -e; for script in $(sort $(wildcard tests/benchmarks/*.py)); do \
		echo "$$script"; $(BIN)/python "$$script"; \
	done

# What the targets above leave behind, except the environment.
clean:
	rm -rf site build dist demo_results .mypy_cache .pytest_cache .ruff_cache
	find keras_multigpu tests examples -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --editable '.[test,docs]'
	touch $@
