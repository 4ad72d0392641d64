# A fresh clone needs Python and make: the first target creates .venv, and a change of
# pyproject.toml brings it up to date.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FIRST_TESTS := tests/augmentation tests/data tests/commands tests/training tests/test_docs.py tests/test_examples.py \
	tests/test_readme_diff.py tests/test_saving.py tests/test_verify.py

.PHONY: test test-all soak lint docs demo bench clean

# Side by side one process, and two in a row that take about as long together, because TensorFlow
# gets slower with every graph that it has seen. The first one's output waits in a file until the
# others are through.
test: $(INSTALLED)
	@mkdir -p build; \
	$(BIN)/python -m pytest $(FIRST_TESTS) >build/first_tests.txt 2>&1 & first=$$!; \
	$(BIN)/python -m pytest tests/callbacks; second=$$?; \
	$(BIN)/python -m pytest tests --ignore=tests/callbacks $(FIRST_TESTS:%=--ignore=%); third=$$?; \
	wait $$first; first=$$?; cat build/first_tests.txt; exit $$((first + second + third))

# Every training of tests/replica_cases.py on 2, 3, 4 and 8 replicas.
test-all: $(INSTALLED)
	KMG_ALL_REPLICAS=1 $(MAKE) test

# The kill test in full: a real training is killed forty times. Takes about ten minutes.
soak: $(INSTALLED)
	KMG_KILLS=40 $(BIN)/python -m pytest tests/callbacks/test_killed_training.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(INSTALLED)
	$(BIN)/keras-multigpu demo

bench: $(INSTALLED)
	@set -e; for script in $(sort $(wildcard tests/benchmarks/bench_*.py tests/benchmarks/parity_*.py)); do \
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
