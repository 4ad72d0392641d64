# A fresh clone needs Python and make: the first target creates .venv, and a change of
# pyproject.toml brings it up to date.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The first that knows dependency groups; that of a new environment may be older.
PIP := 'pip>=25.1'

# The tests by area, which processes work through, the longest first. TensorFlow gets slower with
# every graph that it has seen, so one process for all would take longer.
AREAS := callbacks core training exactness data docs augmentation contract commands
TESTS_training := tests/training
TESTS_exactness := tests/exactness
TESTS_contract := tests/contract
TESTS_callbacks := tests/callbacks
TESTS_data := tests/data
TESTS_augmentation := tests/augmentation
TESTS_docs := $(addprefix tests/test_,docs.py examples.py readme_diff.py)
TESTS_commands := tests/commands tests/explanation tests/rehearsal tests/verification
# Whatever is in no other area.
TESTS_core := tests --ignore=tests/test_search.py $(addprefix --ignore=,$(foreach area,$(filter-out core,$(AREAS)),$(TESTS_$(area))))

# A line of pytest's for each file that is through.
PROGRESS := '\[ *[0-9]+%\]$$'

.PHONY: quick test $(AREAS:%=test-%) test-keras test-all test-oldest test-colab test-nightly keras-tests keras-tests-1 keras-tests-2 \
	soak lint docs docs-look demo bench dist clean

# What takes long is left out: `make quick`, or `make quick AREA=training`.
quick: export PYTEST_ADDOPTS := -m 'not slow and not gpu'
quick: export KMG_QUICK := 1
quick: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 \
		$(addprefix test-,$(or $(AREA:training=training exactness),$(AREAS)))

# Three processes on two cores, for a good part of the time tests wait, for other processes or for
# a disk. They end together: what is short comes last.
# TensorFlow's optimizers take longer than most graphs run, and hardly ever change a number: in
# `make test` what users would notice is optimized, trainings against one device and what Keras
# promises of a model; in `make test-all` everything.
test: export KMG_QUICK := $(if $(KMG_ALL_REPLICAS),0,1)
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --jobs=3 $(addprefix test-,$(AREAS) keras)

# With oneDNN, which fuses and rounds in its own way, as on the CPUs of users.
test-exactness test-contract: export TF_ENABLE_ONEDNN_OPTS ?= 1

# The lines of two areas come mixed while tests run; what else pytest has to say comes in one piece.
$(AREAS:%=test-%): SHELL := /bin/bash
$(AREAS:%=test-%): test-%: $(INSTALLED)
	@mkdir -p build; \
	PYTHONUNBUFFERED=1 $(BIN)/python -m pytest $(TESTS_$*) 2>&1 | tee build/test-$*.txt \
		| grep -a --line-buffered -E $(PROGRESS); \
	status=$${PIPESTATUS[0]}; grep -a -v -E $(PROGRESS) build/test-$*.txt; exit $$status

# Every training of tests/exactness/cases.py on 2, 3, 4 and 8 replicas that sum as GPUs do and as
# CPUs do, and all rows of other tables. CI runs it once a week.
test-all: $(INSTALLED)
	KMG_ALL_REPLICAS=1 $(MAKE) test
	KMG_ALL_REPLICAS=1 KMG_SUMS=one_device $(MAKE) test-exactness

# Keras's own tests of models, each distributed over one replica and over two.
keras-tests: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 keras-tests-1 keras-tests-2

keras-tests-1: KERAS_TESTS := --replicas=1
keras-tests-2: KERAS_TESTS := --replicas=2
# The most telling of them: what `fit`, `evaluate` and `predict` promise. They run in many ways there:
# one of them is enough here.
test-keras: KERAS_TESTS := --replicas=2 trainers/trainer_test.py \
	-k "not (test_steps_per or eager or jit and not non_jit or infinite or multithreading or cw \
	or sparse or predict_generator or loss_scaling or raggeds)"

keras-tests-1 keras-tests-2 test-keras: $(INSTALLED)
	@mkdir -p build; \
	$(BIN)/python tests/keras_suite $(KERAS_TESTS) --tb=short > build/$@.txt 2>&1; \
	status=$$?; tail -n 40 build/$@.txt; exit $$status

# What trains, on other versions: the oldest Keras and TensorFlow that pyproject.toml allows; those of
# Colab and Kaggle, which have Python 3.12; and Keras as it will be, of which only the private names
# are tried. Five to fifteen minutes each.
VERSIONS_oldest = $$(sed -nE \
	's/^dependencies = .*"keras>=([0-9.]+)", "tensorflow>=([0-9.]+)".*/keras==\1.* tensorflow==\2.*/p' \
	pyproject.toml)
VERSIONS_colab := keras==3.13.2 tensorflow==2.20.0 numpy==2.0.2 protobuf==5.29.5
TESTS_nightly := tests/keras_internals
TESTS_oldest := tests/keras_internals $(TESTS_training) $(TESTS_exactness) $(TESTS_contract)
TESTS_colab := $(TESTS_oldest)
OTHER_VERSIONS := oldest colab nightly

$(OTHER_VERSIONS:%=test-%): test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest $(TESTS_$*)

# keras-nightly has the folder of keras, which TensorFlow asks for: it comes last, in its place.
$(OTHER_VERSIONS:%=.venv-%/.installed): .venv-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install $(PIP)
	.venv-$*/bin/pip install --editable '.[all]' --group test $(VERSIONS_$*)
	$(if $(filter nightly,$*),.venv-$*/bin/pip uninstall --yes keras)
	$(if $(filter nightly,$*),.venv-$*/bin/pip install --pre --no-deps keras-nightly)
	touch $@

# The kill tests in full: a real training is killed forty times, and workers twenty times. Takes
# half an hour. Each run kills at other moments: it prints the seed that repeats them.
soak: $(INSTALLED)
	@seed=$${KMG_KILL_SEED:-$$($(BIN)/python -c "import random; print(random.randrange(10**6))")}; \
	echo "The same moments again: KMG_KILL_SEED=$$seed make soak"; \
	KMG_KILLS=40 KMG_KILL_SEED=$$seed $(BIN)/python -m pytest \
		tests/callbacks/resumable_checkpoint/test_killed_training.py \
		tests/cluster/test_killed_workers.py

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest --noconftest -q tests/test_search.py

# Pictures of every page in a real browser, and whether each fits a phone. Needs Chromium.
docs-look: docs
	$(BIN)/python docs/look.py

demo: $(INSTALLED)
	$(BIN)/keras-multigpu demo

bench: $(INSTALLED)
	@set -e; for script in $(sort $(wildcard tests/benchmarks/bench_*.py tests/benchmarks/parity_*.py)); do \
		echo "$$script"; $(BIN)/python "$$script"; \
	done

# What PyPI gets, tried on each supported Python of this machine: ten minutes, and a network.
dist:
	$(PYTHON) tests/release/make_dist.py

# What the targets above leave behind, except the environment.
clean:
	rm -rf site build dist demo_results .mypy_cache .pytest_cache .ruff_cache
	find keras_multigpu tests examples -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP)
	$(BIN)/pip install --editable '.[all]' --group test --group docs
	touch $@
