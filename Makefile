# The two commands of a newcomer: `make quickstart` and `make test`. Each sets everything up first; see `make help`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
SELECT := not slow and not gpu
BENCHMARKS := loop control_plane fixed_work quickstart memory consistency gradloc layerclip exporter engine_metrics
RESULTS := build/benchmarks
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help setup quickstart test lint unit contracts signals test-signals ray-tests engine-tests slow-tests bench clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

setup: ## Virtual environment in .venv with all packages, CPU build; a moment when nothing changed
	@deploy/setup/setup.sh

quickstart: setup ## A real asynchronous RL run on this machine: vLLM generates while FSDP trains
	@$(BIN)/concord run examples/quickstart.toml

test: lint unit contracts signals ray-tests engine-tests ## All checks and suites but the slow and GPU tests
	@echo "make test: lint, unit, contracts, signals, ray and engine suites passed"

lint: setup ## ruff and pyright
	@$(BIN)/ruff check .
	$(BIN)/pyright

unit: setup ## Quick tests without Ray or an engine
	@$(PYTEST) tests/unit -q -n 2 -m "$(SELECT)"

contracts: setup ## Layering, sizes, names, documents
	@$(PYTEST) tests/contracts -q -m "$(SELECT)"

signals: setup ## Prometheus on a small run, and its rules
	@$(PYTEST) tests/signals -q -m "$(SELECT)"

test-signals: setup ## The same, and every declared metric over a rehearsal of real runs
	@$(PYTEST) tests/signals -q

ray-tests: setup ## Tests with real Ray
	@$(PYTEST) tests/ray -q -m "$(SELECT)"

engine-tests: setup ## Tests with real engines and real models
	@$(PYTEST) tests/engines -q -m "$(SELECT)"

slow-tests: setup ## What `make test` leaves out; GPU tests skip where there is no GPU
	@$(PYTEST) tests -q -m "slow or gpu"

bench: setup ## Benchmarks, one JSON each in build/benchmarks; BENCHMARKS=loop runs one
	@mkdir -p $(RESULTS)
	for name in $(BENCHMARKS); do echo "benchmark $$name"; $(BIN)/python benchmarks/$$name.py --out $(RESULTS)/$$name.json; done

clean: ## Remove build outputs and caches; runs and .venv stay
	@rm -rf build ./*.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
