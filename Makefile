# Every target sets up what it needs: a virtual environment in .venv with pinned packages.
PYTHON ?= python3
BIN := .venv/bin
# Which torch `make test-torch` takes. It has an environment of its own.
TORCH ?= 2.15.0
OTHER := .venv-torch-$(TORCH)
# The environment of another Python, PYTHON.
OTHER_PYTHON := .venv-python-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# How many tests run at once: one more than two cores, as many tests wait, for a timeout say.
JOBS ?= 3
PYTEST := python -m pytest -q -n $(JOBS) --dist worksteal

.PHONY: demo test test-long test-thorough test-mutations test-network test-shown test-faults test-simulated test-torch test-python test-clients check conformance bench docs stranger format clean

demo: .venv/ready  ## Train a network on two processes, and show that splitting loses nothing
	$(BIN)/lockstep demo

test: .venv/ready  ## Run the tests
	$(BIN)/$(PYTEST)

test-long: .venv/ready  ## Run what the tests leave out, or only do a part of
	$(BIN)/$(PYTEST) --long

test-thorough: .venv/ready  ## Run what takes minutes and is much like other tests
	$(BIN)/$(PYTEST) --thorough

test-simulated: .venv/ready  ## Run the tests that need GPUs on simulated ones
	$(BIN)/python -m tests.simulated -n $(JOBS) --dist worksteal tests/gpu tests/simulated

test-mutations: .venv/ready  ## Read 10,000 mutations of each kind of file that others may have written
	NUM_MUTATIONS=10000 $(BIN)/$(PYTEST) --long -o timeout=0 tests/checkpoint/test_mutations.py \
	  tests/observe/test_fuzzing.py tests/comm/test_store_entries.py \
	  tests/launcher/test_store_entries.py tests/world/test_store_entries.py

test-shown: .venv/ready  ## Make mistakes in the source, one at a time, and see their tests fail
	$(BIN)/python -m tests.shown_by -j $(JOBS)

test-faults: .venv/ready  ## Make 500 random faults in runs that restart, and kill ranks at 100 moments
	$(BIN)/python -m tests.faults --faults 500 --seed 1 -j 2
	$(BIN)/python -m tests.faults --kills 100 --seed 1

test-network: .venv/ready  ## Let the store fall silent before each kind of request, and networks be slow
	$(BIN)/$(PYTEST) --long -m network tests/world/test_silent_stores.py \
	  tests/launcher/test_slow_networks.py

test-torch: $(OTHER)/ready  ## Run the tests with another torch: make test-torch TORCH=2.15.0
	$(OTHER)/bin/$(PYTEST)

test-python: $(OTHER_PYTHON)/ready  ## Run the tests with another Python: make test-python PYTHON=python3.13
	$(OTHER_PYTHON)/bin/$(PYTEST)

test-clients: .venv-clients/ready  ## Run trainers and libraries that people use over lockstep
	.venv-clients/bin/python -m pytest -q -n $(JOBS) --dist loadfile -m clients tests/clients

check: .venv/ready  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: .venv/ready  ## Run torch's own tests of what we replace against ours
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt expecttest
	$(BIN)/python -m tests.conformance.collectives
	$(BIN)/python -m tests.conformance.ddp

bench: .venv/ready  ## Time collectives, steps and start-up, side by side with torch's; note the ratios by date
	$(BIN)/lockstep bench collectives
	$(BIN)/lockstep run -n 2 -m benchmarks.steps --json .steps.json
	$(BIN)/python -m benchmarks.history .steps.json && rm .steps.json
	$(BIN)/lockstep run -n 2 -m benchmarks.optimizers
	$(BIN)/lockstep run -n 2 -m benchmarks.embeddings
	for n in 1 2 4; do $(BIN)/lockstep run -n $$n -m benchmarks.checkpoint; done
	$(BIN)/lockstep run -n 2 -m benchmarks.loader
	$(BIN)/lockstep run -n 2 -m benchmarks.trace
	$(BIN)/lockstep run -n 2 --restarts 1 -m benchmarks.snapshots
	$(BIN)/python -m benchmarks.data_parallel
	$(BIN)/python -m benchmarks.startup
	$(BIN)/python -m benchmarks.restarts

stranger: .venv/ready  ## Do what docs/start.md says, in a new environment
	$(BIN)/python tests/stranger.py

docs: .venv-docs/ready  ## Make the documentation, docs/_build/index.html; a warning is an error
	.venv-docs/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build

format: .venv/ready  ## Put the code into the house's form
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## Remove the virtual environments
	rm -rf .venv .venv-clients .venv-docs .venv-torch-* .venv-python-* docs/_build docs/_commands docs/_history docs/_pictures docs/_reference

# Makes the virtual environment $(@D) of the extras $(1), with what the files $(2) pin, after $(3).
define make_environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "lockstep needs Python 3.11 or newer, and $(PYTHON) is older. Try: make PYTHON=python3.11"; exit 1; }
$(PYTHON) -m venv $(@D)
$(3)
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
  $(addprefix --constraint ,$(2)) --editable '.[$(strip $(1))]'
endef

comma := ,

# A command that prints where the environment $(1) has its packages.
packages_of = $(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv/ready: pyproject.toml constraints.txt
	$(call make_environment,demo$(comma)dev,constraints.txt)
	touch $@

$(OTHER)/ready: pyproject.toml constraints.txt
	$(call make_environment,demo$(comma)dev,$(@D)/constraints.txt,\
	  sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(@D)/constraints.txt)
	touch $@

$(OTHER_PYTHON)/ready: pyproject.toml constraints.txt
	$(call make_environment,demo$(comma)dev,constraints.txt)
	touch $@

.venv-docs/ready: .venv/ready constraints-docs.txt
	$(call make_environment,docs,constraints.txt constraints-docs.txt,\
	  $(call packages_of,.venv) > $$($(call packages_of,$(@D)))/venv.pth)
	touch $@

# Half a gigabyte on top of .venv. timm asks for torchvision, which isn't there for every build of
# torch, and of which its models need nothing: the tests have a stand-in.
.venv-clients/ready: .venv/ready constraints-clients.txt
	$(call make_environment,clients$(comma)dev,constraints.txt constraints-clients.txt,\
	  $(call packages_of,.venv) > $$($(call packages_of,$(@D)))/venv.pth)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --constraint constraints-clients.txt timm
	touch $@
