# `make demo` and `make test` set up everything they need in .venv; nothing is installed by hand.
PYTHON ?= python3
BIN := .venv/bin
CACHE := .cache
export JAX_PLATFORMS ?= cpu
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/$(CACHE)/jax

.PHONY: demo test lint types pytest clean

demo: .venv/demo.stamp
	@$(BIN)/python -m v41jax.demo

test: lint types pytest

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test.stamp
	$(BIN)/mypy

pytest: .venv/test.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

.venv/pip.stamp:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@touch $@

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

.venv/test.stamp: .venv/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[tokenizer,server,vision,tiers,test,notebooks,compile-gates,training]'
	@touch $@ .venv/demo.stamp

clean:
	rm -rf .venv $(CACHE) .mypy_cache .ruff_cache .pytest_cache .hypothesis
