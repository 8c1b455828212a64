# Two commands matter: `make demo` and `make test`. Each sets up its own environment first.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
CONSTRAINTS ?= constraints.txt

.PHONY: setup demo test slow lint coverage fuzz bench docs docs-serve release-check clean
.DEFAULT_GOAL := demo

setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("clipless needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy $$(find tests -name '*.py' -not -name 'test_*')
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/front_doors.py --quiet --limit clipless=0 --limit benchmarks=0 --limit examples=0
	$(BIN)/python tools/architecture.py --check

# Two workers, one core each; the tests of a file stay together, since they share what they train.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The tests that take minutes each.
slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# The share of lines and branches that the default suite runs; what child processes run is not seen.
# `make coverage TESTS=tests/ledger` measures a part of it.
coverage: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report term $(TESTS)

# The tests that draw their examples, with new examples and many of them.
fuzz: setup
	CLIPLESS_TEST_ENTROPY=fresh OMP_NUM_THREADS=1 \
	$(BIN)/python -m pytest -n 2 --hypothesis-profile fuzz $$(grep -rl --include='*.py' @given tests)

bench: setup
	$(BIN)/python benchmarks/overhead.py

# The documentation site in build/site, notebooks and figures included; every warning is an error. Then it is clicked
# through in Chromium, if there is one.
docs: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -k snippets tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict
	CLIPLESS_SITE=build/site $(BIN)/python -m pytest -m slow -k "not notebooks" tests/test_site_build.py

# The same in a browser, at http://127.0.0.1:8000, rebuilt when a page changes; without notebooks' outputs.
docs-serve: setup
	NO_MKDOCS_2_WARNING=1 CLIPLESS_SITE_NOTEBOOKS=skip $(BIN)/python -m mkdocs serve

# Everything that a release must be: packages, metadata, fresh installations with every extra.
release-check: setup
	$(BIN)/python tools/release/check.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
