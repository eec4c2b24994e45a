# Every target does its own set-up in .venv with plain `pip install`; your pip settings are honoured, and a second run is quick.
#   make demo        the whole job on data that it makes itself
#   make test        lint, types, doctests, CPU tests             make test TRANSFORMERS=5.17.0    with that version of transformers
#   make test-gpu    the tests that need a CUDA device, on all     make test-gpu PY=python3         with an interpreter that has all of it already
#                    cards of the machine or those in              make test-gpu GPU_WORKERS=4      four processes for each card, in place of twelve
#                    CUDA_VISIBLE_DEVICES
#   make test-faults that each fault planted in a kernel turns its tests red, and the long half of kills, damage, signals, resume and dead ranks
#   make test-lightning LIGHTNING=FOLDER   Lightning's own tests with our strategy as the default; FOLDER is a checkout of Lightning
#   make docs        the pages of docs/ that are generated: families, options, results, pictures
#   make site        the pages as a site in build/site, with its links checked
#   make test-seams  only the quick tests against transformers and PEFT; with TRANSFORMERS=5.17.0 in an environment of its own,
#                    which has all else from .venv

PYTHON ?= python3
VENV := .venv
TRANSFORMERS ?=

export TOKENIZERS_PARALLELISM := false
# Keep bytecode even where the environment forbids it. Without it every process compiles torch and transformers again:
# 19.5 s of CPU for their import, 6.8 s with it.
export PYTHONDONTWRITEBYTECODE :=

# A process per core; what a file sets up once stays in one process.
# Files in the order of conftest.py: those with slow tests first, so that no core ends long before the others.
# A worker that dies ends the run at once: xdist would wait for ever for the tests that it had left.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# A test that hangs ends the run with the stacks of its process. Ranks write theirs after 300 s.
HANGS := -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true

# Tests on GPUs: processes for each card, the cards, and pairs of them without the one that is over.
GPU_WORKERS := 12
comma := ,
CARDS = $(or $(subst $(comma), ,$(CUDA_VISIBLE_DEVICES)),$(shell nvidia-smi --query-gpu=index --format=csv,noheader))
PAIRS = $(filter-out %$(comma),$(shell printf '%s\n' $(CARDS) | paste -d$(comma) - -))
# Files with such tests only: in each process the collection of all files takes 20 s longer.
GPU_FILES = $(shell grep -rlE 'mark\.(gpu|multi_gpu)' --include='test_*.py' tests)
GPU_LOGS := build/test-gpu
# Arguments: name, marks, cards (or pairs) of one process each.
gpu_tests = { $(PY) -m pytest -q --durations=15 --junitxml=$(GPU_LOGS)/$(1).xml -m '$(2)' --dist loadgroup --no-loadscope-reorder \
  --max-worker-restart=0 $(foreach card,$(3),--tx popen//env:CUDA_VISIBLE_DEVICES=$(card)) $(GPU_FILES) || touch $(GPU_LOGS)/failed; } \
  2>&1 | tee $(GPU_LOGS)/$(1).log

# The tests against transformers and PEFT: those that together call every function of both that all tests of hf, patches,
# mixers, moe and fused call (chosen by tests/support/seam_choice.py), packed documents of every family, and chat templates.
SEAMS := $(shell cat tests/seams.txt) tests/patches/test_attention.py::test_packed_documents_equal_one_by_one tests/packing/tokens

# The CPU tests and the doctests.
CASES := --doctest-modules --ignore-glob='lightning_fastft/kernels/*/triton.py' -m 'not gpu and not multi_gpu and not fault' lightning_fastft tests

# Compile modules to bytecode on import instead of all of them at install.
PIP_OPTIONS := --no-compile

ifdef PY
SETUP :=
DEV_SETUP :=
BYTECODE :=
else
PY := $(VENV)/bin/python
SETUP := $(VENV)/.package
DEV_SETUP := $(VENV)/.dev
BYTECODE := $(VENV)/.bytecode
endif

# An older transformers for test-seams goes beside the newest one, so that both can be tested at once.
OLDER :=
ifneq ($(filter test-seams,$(MAKECMDGOALS)),)
OLDER := $(TRANSFORMERS)
override TRANSFORMERS :=
endif
SEAMS_SETUP := $(if $(OLDER),$(VENV)/transformers-$(OLDER)/.done)
SEAMS_PY := $(if $(OLDER),$(VENV)/transformers-$(OLDER)/bin/python,$(PY))

WANTED := transformers $(or $(TRANSFORMERS),newest)
ifneq ($(shell cat $(VENV)/.dev 2>/dev/null),$(WANTED))
.PHONY: $(VENV)/.dev
endif

.PHONY: demo docs site test test-faults test-gpu test-lightning test-seams lint types tests clean

demo: $(SETUP)
	$(PY) -m lightning_fastft demo

docs: $(DEV_SETUP)
	$(PY) docs/generate.py
	$(PY) docs/pictures.py

site: $(DEV_SETUP)
	$(PY) -m mkdocs build --strict

# In parallel: lint and types use one core, and the tests do not fill two to their end.
test: $(DEV_SETUP)
	$(MAKE) -j3 lint types tests

lint: $(DEV_SETUP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(DEV_SETUP)
	$(PY) -m mypy

tests: $(DEV_SETUP) $(BYTECODE)
	$(PY) -m pytest -q $(WORKERS) $(HANGS) $(CASES)

test-seams: $(DEV_SETUP) $(SEAMS_SETUP)
	$(SEAMS_PY) -m pytest -q $(WORKERS) $(HANGS) -m 'not gpu and not multi_gpu and not fault and not slow' $(SEAMS)

test-faults: $(DEV_SETUP)
	$(PY) -m pytest -q $(WORKERS) -m 'fault and not gpu and not multi_gpu' tests

test-lightning: $(DEV_SETUP)
	$(PY) -m tests.lightning_suite --tests $(or $(LIGHTNING),$(error LIGHTNING=FOLDER is missing: a checkout of Lightning at the installed version))

# Compilation takes most of the time, on the CPU, so processes share a card; tests that measure have a card each, and
# ranks a pair of cards. One log and one list of times (junit) for each of the three.
test-gpu: $(DEV_SETUP)
	$(if $(CARDS),,$(error no CUDA device: nvidia-smi lists none, and CUDA_VISIBLE_DEVICES is not set))
	@rm -rf $(GPU_LOGS) && mkdir -p $(GPU_LOGS)
	@$(call gpu_tests,shared,gpu and not multi_gpu and not alone,$(foreach round,$(shell seq $(GPU_WORKERS)),$(CARDS)))
	@$(call gpu_tests,alone,gpu and not multi_gpu and alone,$(CARDS))
	@$(call gpu_tests,ranks,multi_gpu,$(or $(PAIRS),$(CARDS)))
	@cd $(GPU_LOGS) && for name in shared alone ranks; do echo "$$name: $$(tail -n 1 $$name.log)"; done; test ! -e failed

# Without a GPU, a build of torch for the CPU is taken where pip's sources have one: the other one brings gigabytes of CUDA libraries along.
# The pip that comes with Python 3.11 takes twice as long to find what to install.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	@cpu=; command -v nvidia-smi >/dev/null 2>&1 || \
	  cpu=$$($(VENV)/bin/python -m pip index versions torch 2>/dev/null | tr ', ' '\n\n' | grep -E '^[0-9.]+\+cpu$$' | head -n 1); \
	set -x; $(VENV)/bin/python -m pip install $(PIP_OPTIONS) "torch>=2.10$${cpu:+,==$$cpu}"
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) -e .
	@touch $@

# The bytecode of torch (10 s of CPU) is written while pip installs the rest. If that import meets a half-installed package,
# only the time is lost.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(VENV)/bin/python -c 'import torch._inductor.compile_fx' >/dev/null 2>&1 &
	$(VENV)/bin/python -m pip install $(PIP_OPTIONS) --upgrade-strategy only-if-needed -e '.[dev]' '$(if $(TRANSFORMERS),transformers==$(TRANSFORMERS),transformers)'
	@touch $(VENV)/.package
	@echo '$(WANTED)' > $@

# One process writes the bytecode of tests and libraries first: all processes at once would each write all of it.
# The import and collection of all tests takes 51 s of CPU without bytecode, and 15 s with it.
$(VENV)/.bytecode: $(VENV)/.dev
	$(PY) -m pytest -q --collect-only $(CASES) | tail -n 1
	@touch $@

$(VENV)/transformers-%/.done: | $(DEV_SETUP)
	$(PY) -m venv --without-pip $(@D)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" > \
	  "$$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/all_else.pth"
	$(@D)/bin/python -m pip install $(PIP_OPTIONS) transformers==$*
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
