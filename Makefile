# Every target sets up what it needs in .venv (and .venv-newest for the tests): with uv when it is there, with python3's
# own venv and pip when it is not. PYTHON=/path/to/python3 names the interpreter, ARGS="..." goes to the tool that runs.

PYTHON ?=
ARGS ?=
export PYTHON

python := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test kill9 soak faults fuzz mutants figures golden reference lint types scenarios bench env clean distclean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Run an order that is killed twice with kill -9, and see it finish
	@tools/setup.sh .venv run $(PYTHON)
	@tools/demo.sh $(python)

test: ## Run the tests under the oldest and the newest supported Python here
	@tools/test.sh $(ARGS)

kill9: ## Kill a process with 150 workflows again and again until all have ended, and check (ARGS="--seed 7")
	@tools/setup.sh .venv run $(PYTHON)
	$(python) tests/soak/soak.py --workflows 150 --deaths 20 --life 1 --max-live 20 --seed 1 $(ARGS)

soak: ## The same with 1,000 workflows, then 50,000 simulated processes (ARGS="--incarnations 1000000", "--simulated": these alone)
	@tools/setup.sh .venv test $(PYTHON)
	$(python) tests/soak/soak.py --incarnations 50000 $(ARGS)

mutants: ## Plant known bugs one at a time, and see which test catches each (ARGS="NAME ...", ARGS=--list)
	@tools/setup.sh .venv test $(PYTHON)
	$(python) tests/mutants/mutants.py $(ARGS)

figures: ## Put what `make test` and `make mutants` have counted into docs/explanation/how-we-test.md
	@tools/setup.sh .venv run $(PYTHON)
	$(python) tools/figures.py $(ARGS)

golden: ## Record the golden histories of this release (tests/replay/golden); one that is recorded stays as it is
	@tools/setup.sh .venv test $(PYTHON)
	PYTHONPATH=tests/support $(python) tests/replay/record.py

reference: ## Run this engine and the reference engine by turns on the same bytes (needs node and npm)
	@tools/setup.sh .venv test $(PYTHON)
	@tools/reference.sh $(python) $(ARGS)

faults: ## Let real processes die and fail at every system call, and fill real disks (Linux; needs strace and unshare)
	@tools/setup.sh .venv test $(PYTHON)
	@tools/faults.sh $(python) $(ARGS)

fuzz: ## Fuzz every decoder, guided by coverage, and whole namespaces (ARGS="--seconds 600 --seed 7")
	@tools/setup.sh .venv test $(PYTHON)
	$(python) tests/fuzz/fuzz.py $(ARGS)

lint: env ## Check style and formatting (ruff)
	$(python) -m ruff check .
	$(python) -m ruff format --check .

types: env ## Check types: mypy and pyright, both strict, and that the public API is fully typed
	@tools/types.sh

scenarios: env ## Check that every scenario due has its tests; writes build/scenarios.md
	$(python) -m pytest --collect-only -qq --scenario-check --scenario-table=build/scenarios.md $(ARGS)

bench: ## Run the benchmarks (ARGS="name ..." for some of them)
	@tools/setup.sh .venv run $(PYTHON)
	@tools/bench.sh $(python) $(ARGS)

env: ## Make .venv hold everything a developer needs
	@tools/setup.sh .venv dev $(PYTHON)

clean: ## Remove what was built, cached or left by the demo
	rm -rf build dist demo-data .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf .venv .venv-oldest .venv-newest
