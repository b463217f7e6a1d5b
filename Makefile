# Every target installs what it needs. Requires only `make` and python3 (3.11 or newer).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory
# Without bytecode files each of the many processes would compile all modules again, so ignore this setting of the user.
export PYTHONDONTWRITEBYTECODE :=

# Default: the system's own Python if it is 3.11 or newer, otherwise python3 on the PATH.
PYTHON ?=
BIN := .venv/bin
# Root of the demo's lakehouse: an absolute path, or a URI with options and credentials in the environment (docs/python.md).
ROOT ?= $(CURDIR)/.demo/lakehouse
DAGSTER_HOME ?= $(CURDIR)/.demo/dagster_home
PORT ?= 3000
# For make dist: Python versions or interpreters; by default 3.11 to 3.14.
PYTHONS ?=
# Cache of mypy, shared by clones of this repository: without it mypy takes a minute.
MYPY_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trinitylake-tests/mypy
# Additional arguments for the demo or pytest.
ARGS ?=
WITH_SHUFFLED_LISTS := tests/transaction tests/operations tests/iceberg tests/tree tests/format
LONG_ON_MOTO := tests/transaction/test_transaction.py tests/operations/test_rollback.py
# Tests that `make soak` repeats with lakehouses on each other server.
ON_OTHER_SERVERS := tests/transaction tests/concurrency tests/operations tests/iceberg
OTHER_SERVERS := radosgw azurite fake_gcs dynalite redis_server valkey_server hdfs

#: Tests of the engine without servers, a JVM or Dagster: less than a minute on 2 cores.
UNIT_TESTS := tests/transaction tests/format/test_file_names.py tests/format/test_keys.py tests/format/test_definitions.py \
	tests/format/test_locations.py tests/format/test_sealed_files.py tests/format/test_version_ranges.py \
	tests/format/test_checksums.py tests/format/test_limits.py tests/format/test_vectors.py tests/tree/test_key_ranges.py \
	tests/iceberg/test_table_ownership.py tests/test_architecture.py tests/test_cached_attribute.py tests/test_public_api.py \
	tests/test_threat_model.py
#: Tests of `make check`: about three minutes.
QUICK_TESTS := $(UNIT_TESTS) tests/access tests/format tests/tree tests/golden tests/iceberg/test_catalog.py \
	tests/iceberg/test_staging.py tests/iceberg/test_avro_decoder.py tests/test_project.py

.PHONY: help setup demo ui test unit check lint bench docs proto package dist constraints soak metrics clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "Variables: ROOT (demo lakehouse, a folder or a URI such as s3://bucket/prefix), DAGSTER_HOME (demo runs), PORT (of make ui), ARGS (for demo or pytest), PYTHON"

setup: ## create .venv with the pinned packages, unless it is current
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh

demo: setup ## run the demo: publish real flight data by month, roll back, export, verify
	@mkdir -p "$(DAGSTER_HOME)"
	@[ -e "$(DAGSTER_HOME)/dagster.yaml" ] || cp deploy/demo/dagster.yaml "$(DAGSTER_HOME)/dagster.yaml"
	@TRINITYLAKE_ROOT="$(ROOT)" DAGSTER_HOME="$(DAGSTER_HOME)" $(BIN)/python -m trinitylake_ops.demo $(ARGS)

ui: ## serve the Dagster UI with the runs of the demo at http://127.0.0.1:PORT
	@if [ ! -d "$(DAGSTER_HOME)/history" ]; then \
		echo "make ui: no runs in $(DAGSTER_HOME) yet; run 'make demo' first" >&2; exit 1; fi
	@$(MAKE) setup
	@echo "==> Dagster UI on http://127.0.0.1:$(PORT) (press Ctrl-C to stop)"
	@TRINITYLAKE_ROOT="$(ROOT)" DAGSTER_HOME="$(DAGSTER_HOME)" exec $(BIN)/dagster-webserver \
		--host 127.0.0.1 --port "$(PORT)" --python-file definitions.py --log-level warning

test: ## run all tests and lint (with ARGS: only the tests)
	@scripts/run_tests.sh $(ARGS)

unit: setup ## run the engine tests without servers, JVM and Dagster, in less than a minute
	@$(BIN)/python -m pytest -q --workers 2 -m "not soak and not debian_packages" $(UNIT_TESTS) $(ARGS)

check: lint ## run lint, type checks, import contracts and the quick tests, in about three minutes
	@echo "==> pytest (quick tests)"; $(BIN)/python -m pytest -q --workers 2 \
		-m "not soak and not debian_packages" $(QUICK_TESTS) $(ARGS)

soak: setup ## run the long tests, and the engine tests on every storage; logs to soak/
	@LONG_ON_MOTO="$(LONG_ON_MOTO)" WITH_SHUFFLED_LISTS="$(WITH_SHUFFLED_LISTS)" \
		ON_OTHER_SERVERS="$(ON_OTHER_SERVERS)" OTHER_SERVERS="$(OTHER_SERVERS)" scripts/run_soak.sh $(ARGS)

lint: setup ## run ruff, codespell, mypy --strict, import contracts and dependency checks
	@echo "==> ruff check"; $(BIN)/ruff check --quiet .
	@echo "==> ruff format --check"; $(BIN)/ruff format --quiet --check . \
		|| { echo "files are not formatted; run $(BIN)/ruff format ." >&2; exit 1; }
	@echo "==> codespell"; $(BIN)/codespell
	@echo "==> mypy --strict"; $(BIN)/mypy --cache-dir $(MYPY_CACHE) --strict --no-error-summary trinitylake_ops definitions.py
	@echo "==> import contracts"; $(BIN)/lint-imports --no-logo > .venv/lint-imports.log \
		|| { cat .venv/lint-imports.log; exit 1; }
	@echo "==> declared dependencies"; $(BIN)/deptry . > .venv/deptry.log 2>&1 \
		|| { cat .venv/deptry.log; exit 1; }

bench: setup ## run the benchmarks and write tables and plots to benchmarks/results/ (about 50 minutes)
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh bench
	@for benchmark in request_counts buffer_targets times catalogs writers compression scale profiles server spark_read start_up telemetry; do $(BIN)/python -m benchmarks.$$benchmark; done
	@scripts/debian_packages.sh >/dev/null; $(BIN)/python -m benchmarks.expiry; $(BIN)/python -m benchmarks.exports; $(BIN)/python -m benchmarks.clones; $(BIN)/python -m benchmarks.s3; $(BIN)/python -m benchmarks.storages; $(BIN)/python -m benchmarks.processes; $(BIN)/python -m benchmarks.replicas; $(BIN)/python -m benchmarks.peers

metrics: setup ## print the size of the package and how much of it each common operation runs
	@$(BIN)/python scripts/metrics.py

docs: setup ## build the documentation site and check its links: .site/html/index.html
	@$(BIN)/python -m scripts.docs_site

proto: setup ## generate trinitylake_ops/format/definitions_pb2 from proto/definitions.proto
	@$(BIN)/python scripts/generate_protobuf.py .

package: setup ## build the files for spark-submit in dist/: docs/spark/cluster.md
	@scripts/package.sh

dist: setup ## build sdist, wheel and SBOM in dist/, and test the wheel with each extra and Python: docs/release.md
	@PYTHON="$(PYTHON)" scripts/setup_venv.sh release
	@PYTHONS="$(PYTHONS)" scripts/dist.sh

constraints: setup ## update constraints.txt to the newest versions that pyproject.toml allows
	@scripts/update_constraints.sh

clean: ## remove .venv, caches, and the lakehouse and runs of the demo
	@rm -rf .venv .demo .site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist \
		*.egg-info spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
