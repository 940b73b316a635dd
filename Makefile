# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export MLFLOW_DISABLE_TELEMETRY := true

.PHONY: demo test test-slow test-faults soak lint bench results clean

demo: $(READY)
	$(BIN)/persafl demo

PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# The first tier: lint, types, every law, a short form of each fault, the README's commands. Below five minutes.
test: $(READY) lint
	$(PYTEST)

# The second tier: Ray clusters, a browser, killed processes, a plug-in's wheel.
test-slow: $(READY)
	$(PYTEST) -m "slow and not faults" --durations=10

# Processes killed at random moments, full disks, locked databases, slow servers: minutes, not seconds.
test-faults: $(READY)
	$(BIN)/python -m pytest tests/faults tests/engine/test_resume.py tests/sweep/test_launchers.py -m "faults or not faults" --durations=5

# 100,000 updates: does memory stay flat?
soak: $(READY)
	$(BIN)/python -m benchmarks.soak

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/results/README.md and its figures, from the CSV files beside it.
results: $(READY)
	$(BIN)/python docs/results/render.py

# Peers need versions of their own, so they get an environment of their own; MNIST comes by `persafl data`.
bench: $(READY) .venv-peers/.ready
	$(BIN)/persafl data mnist
	$(BIN)/python -m benchmarks

.venv-peers/.ready:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check "pfl==0.6.0"
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch torchvision "flwr[simulation]>=1.20"
	touch .venv-peers/.ready

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-peers dist build *.egg-info .mypy_cache .ruff_cache
