"""Hooks, fixtures and Hypothesis profiles that all tests share."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from tests.avro_schemas import cache_avro_schemas
from tests.clock import ManualClock, TickingClock
from tests.unordered_lists import shuffle_listings
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.storage.cache.storage import clear_process_caches

# CI runs the same examples every time; local runs use new ones. Deadlines would only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25)
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

cache_avro_schemas()

#: Name of a property (``record_property``) whose text is printed after all tests.
SUMMARY_PROPERTY = "summary"

#: Folders of the slowest tests.
_SLOWEST_FOLDERS = ("spark", "spark_deployments", "e2e", "dagster_plugin", "simulator", "crash")

pytest_plugins = ["tests.servers.plugin", "tests.workers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lists",
        choices=["ordered", "shuffled"],
        default="ordered",
        help="shuffled: memory and local storages list files in random order, like directory buckets of S3 Express",
    )


@pytest.fixture(autouse=True)
def _shuffle_listings_if_requested(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make memory and local storages list files in random order if ``--lists=shuffled`` is set."""
    if request.config.getoption("lists") == "shuffled":
        shuffle_listings(monkeypatch)


@contextmanager
def _fixed_requests() -> Iterator[None]:
    with background.inline(), process_clock.using(TickingClock()):
        yield


@pytest.fixture(scope="module")
def fixed_requests() -> Iterator[None]:
    """Fix the number and order of requests: background work runs inline, and each reading of the clock takes 10 ms.

    Use it in modules that count requests or fail a request by its number. The next call cannot reuse the version that
    ``Lakehouse.open`` read, because by then it is too old.
    """
    with _fixed_requests():
        yield


@pytest.fixture
def fixed_requests_of_test() -> Iterator[None]:
    """Fix the number and order of requests like ``fixed_requests``, but for a single test."""
    with _fixed_requests():
        yield


@pytest.fixture
def manual_clock() -> Iterator[ManualClock]:
    """The process clock, which advances only by pauses and by ``advance``."""
    clock = ManualClock()
    with process_clock.using(clock):
        yield clock


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Wait for the background work of a test before its fixtures are torn down."""
    background.drain()


@pytest.fixture(autouse=True)
def _clear_caches() -> Iterator[None]:
    """Clear the caches of the process after each test, so that tests share no cached files."""
    yield
    clear_process_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that other workers run the rest in parallel."""
    items.sort(
        key=lambda item: next(
            (rank for rank, name in enumerate(_SLOWEST_FOLDERS) if name in item.path.parts), len(_SLOWEST_FOLDERS)
        )
    )


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, and collect less often than by default."""
    # Since Python 3.14, Hypothesis loses track of random generators that are frozen, so make it create its own first.
    settings(max_examples=1, database=None)(given(none())(lambda _: None))()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the texts that tests recorded, including tests that ran in worker processes."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SUMMARY_PROPERTY:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
