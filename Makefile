# Every target sets up what it needs: a virtual environment in .venv with pinned packages.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-clients check bench format clean

demo: .venv/ready  ## Train a network on two processes, and show that splitting loses nothing
	$(BIN)/lockstep demo

test: .venv/ready  ## Run the tests
	$(BIN)/python -m pytest -q

test-clients: .venv-clients/ready  ## Run trainers and libraries that people use over lockstep
	.venv-clients/bin/python -m pytest -q -m clients tests/clients

check: .venv/ready  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready  ## Time collectives, steps and start-up, side by side with torch's
	$(BIN)/lockstep bench collectives
	$(BIN)/lockstep run -n 2 -m benchmarks.steps
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.startup

format: .venv/ready  ## Put the code into the house's form
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environments
	rm -rf .venv .venv-clients

needs_python = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "lockstep needs Python 3.11 or newer, and $(PYTHON) is older. Try: make PYTHON=python3.11"; exit 1; }

.venv/ready: pyproject.toml constraints.txt
	$(needs_python)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

# An environment of its own, of a gigabyte. timm asks for torchvision, which isn't there for every
# build of torch, and of which its models need nothing: the tests have a stand-in.
.venv-clients/ready: pyproject.toml constraints.txt constraints-clients.txt
	$(needs_python)
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --constraint constraints-clients.txt --editable '.[clients,dev]'
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --constraint constraints-clients.txt timm
	touch $@
