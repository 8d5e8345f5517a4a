# make demo: install into .venv and run the main job.  make test: install and run every check.
# make docs: the documentation as pages to read, in build/site.
# make test-oldest: the tests under the oldest supported torch, in an environment of its own (.venv-oldest).
# All can be repeated; the installation runs again only when pyproject.toml or the constraints change.
#   PYTHON=python3.12 make test     another interpreter (3.10 to 3.13)
#   JOBS=4 make test                more test processes (each uses one thread)
#   STOF_INSTALL_BROWSER=1 make test    as root: installs Chromium for the tests of the HTML report

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' $(CONSTRAINTS))
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CHECK := OMP_NUM_THREADS=1 $(BIN)/pytest -q --durations=10 -n $(JOBS) --dist worksteal
# collecting all tests takes half a minute of two processes: only the files that have the mark
MARKED = $$(grep -rl --include='test_*.py' $(1) tests)

# Images set it, and then each of the hundreds of processes that tests start compiles our sources,
# and each test process the tests themselves
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-oldest lint types docs browser unit interpreter compile-only clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-demo
	$(BIN)/stof demo $(ARGS)

test: lint types docs unit interpreter compile-only

test-oldest:
	$(MAKE) unit VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# kernels/ and templates/ are parts of the package: links show mypy the layout of an installed copy
types: $(VENV)/.installed-test
	@rm -rf $(VENV)/types && mkdir -p $(VENV)/types/stof_compile
	@ln -s $(CURDIR)/stof_compile/* $(CURDIR)/kernels $(CURDIR)/templates $(VENV)/types/stof_compile/
	cd $(VENV)/types && ../bin/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

# a warning is an error: links, anchors and pages that the navigation lacks
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# says so where there is no browser: its tests are skipped then
browser:
	@.ci/browser

unit: $(VENV)/.installed-test browser
	$(CHECK) -m "not interpreter and not compile_only and not gpu" tests

# a process of its own: Triton reads the flag when a kernel is decorated
interpreter: $(VENV)/.installed-test
	TRITON_INTERPRET=1 $(CHECK) -m interpreter $(call MARKED,interpreter)

compile-only: $(VENV)/.installed-test
	$(CHECK) -m compile_only $(call MARKED,compile_only)

clean:
	rm -rf $(VENV) .venv-oldest build .mypy_cache .pytest_cache .ruff_cache .hypothesis stof-dump

# -- installation ---------------------------------------------------------------------------------

$(VENV)/.installed-torch: $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; ok = (3, 10) <= sys.version_info[:2] <= (3, 13); \
	  sys.exit(0 if ok else "Python 3.10 to 3.13 is needed, %s is %d.%d: set PYTHON=..." % (sys.executable, *sys.version_info[:2]))'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip 'setuptools>=77'
	$(PIP) install 'torch==$(TORCH)'
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed-torch pyproject.toml $(CONSTRAINTS)
	$(PIP) install --no-build-isolation -c $(CONSTRAINTS) -e '.[$*]'
	@touch $@
