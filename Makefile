# make env    .venv with everything constraints.txt pins, and the command patchline; does nothing when up to date
#             CPU=1 takes PyTorch's builds without CUDA, for a machine without a GPU: 4 GB less
# make demo   the whole campaign on UCI's handwritten digits: shards to few-shot, with a worker killed on the way
# make cluster-demo  the README's "Submit to a cluster" on three hosts of this machine, one of them killed; needs root
# make check  style, types, the layout and the quick tests, within two minutes
# make test   all tests but the long ones, three at a time; says at the end how long each area took
# make soak   the long tests, make check-oldest, an hour of 48 readers on an emulated Hub, then an hour of faults;
#             MINUTES=5 makes both shorter, SEED=7 repeats the faults
# make check-oldest  the quick tests with Python 3.12 and torch 2.11, in .versions/torch-2.11
# make versions  three releases of torch with four of DeepSpeed, compared bit for bit at every ZeRO stage, in .versions
# make gpu    what only a GPU can show: its tests and benchmarks, one page that grows; DEVICE=cpu rehearses it
# make gpu-bundle  .gpu/: what a GPU machine without network, Ray and DeepSpeed lacks to run `make gpu`
# make lint   style and types

# The first of these that is new enough; another one: make env PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
MINUTES ?= 60
STAMP := .venv/.installed

# PyTorch's own package index: only it has the builds without CUDA, of torch and of the torchvision that fits them. Later
# updates of an environment keep its kind; make env CPU= installs the builds with CUDA again.
CPU ?= $(wildcard .venv/.cpu)
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(CPU),)
CONSTRAIN := cat constraints.txt
INDEX :=
else
CONSTRAIN := sed -E -e '/^(triton|nvidia-|cuda-)/d' -e 's/^(torch|torchvision)=+(.*)/\1==\2+cpu/' constraints.txt
INDEX := --extra-index-url $(CPU_INDEX)
endif

# Environments with other releases of torch, and folders with releases of DeepSpeed.
VERSIONS ?= .versions
VERSIONS_PYTHON ?= python3.12
TORCHES ?= 2.11 2.13 2.15
DEEPSPEEDS ?= 0.19.4 0.19.6 0.19.7 0.19.8
OLDEST := $(VERSIONS)/torch-$(firstword $(TORCHES))

PRINT_REQUIREMENTS := 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*p["dependencies"], *p["optional-dependencies"]["test"], sep="\n")'

# Images of containers often forbid Python to keep compiled modules: then each of a thousand test processes compiles again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env demo cluster-demo check check-oldest versions test soak gpu gpu-bundle lint

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "found no Python 3.11 or newer; install one, or name it: make env PYTHON=/path/to/python3.11"; exit 69; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -c $(PRINT_REQUIREMENTS) > $(STAMP).txt
	@$(CONSTRAIN) > $(STAMP).constraints.txt
	@echo "installing $$(grep -c = $(STAMP).constraints.txt) packages into .venv, in about five minutes"
	$(BIN)/python -m pip install $(INDEX) --constraint $(STAMP).constraints.txt --requirement $(STAMP).txt
	@$(if $(CPU),touch .venv/.cpu,rm -f .venv/.cpu)
	@# the command $(BIN)/patchline, which runs this very checkout
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(STAMP)

demo: env
	$(BIN)/python -m tests.support.demo

cluster-demo: env
	$(BIN)/python -m tests.support.cluster_demo

# A quick test file says so itself: `pytestmark = pytest.mark.quick`.
check: lint
	$(BIN)/python -m pytest -m "quick and not slow"

check-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -p no:cacheprovider -m "quick and not slow"

versions: env $(TORCHES:%=$(VERSIONS)/torch-%/.installed) $(DEEPSPEEDS:%=$(VERSIONS)/deepspeed-%/.installed)
	$(BIN)/python -m benchmarks.versions $(VERSIONS)

# torch and the libraries that it brings have versions of their own there.
$(VERSIONS)/torch-%/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(VERSIONS_PYTHON) -m venv $(@D)
	grep -vE '^(torch|torchvision|triton|nvidia-[^=]*|cuda-[^=]*)=' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -c $(PRINT_REQUIREMENTS) > $@.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --requirement $@.txt 'torch==$*.*'
	@touch $@

# Only the package: its requirements are in every environment.
$(VERSIONS)/deepspeed-%/.installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) 'deepspeed==$*'
	@touch $@

# Three processes on two cores, because tests wait for a quarter of their time. Each takes one file after the other, the
# long ones first (tests/conftest.py): the tests of a file share their fixtures, and all end at about the same time.
test: env
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

soak: env
	$(BIN)/python -m pytest -m slow
	$(MAKE) check-oldest
	$(BIN)/python -m tests.support.hub_soak --minutes $(MINUTES)
	$(BIN)/python -m tests.support.cluster_soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# If torch sees no GPU it is rehearsed on the CPU, with tiny models, in minutes.
gpu: env
	$(BIN)/python -m benchmarks.gpu $(if $(DEVICE),--device $(DEVICE))

gpu-bundle: env
	$(BIN)/python -m benchmarks.gpu.bundle

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
