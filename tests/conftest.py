"""Settings for all tests."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from tests.clock import ManualClock, TickingClock
from tests.known_schemas import keep_known_schemas
from tests.unordered_lists import shuffle_listings
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.storage.cache.storage import clear_process_caches

# CI runs the same examples every time; local runs use new ones. Deadlines would only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("soak", deadline=None, max_examples=200)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

keep_known_schemas()

#: A property (``record_property``) whose text is shown after all tests.
SHOWN = "shown"

_LONGEST = ("spark", "spark_deployments", "e2e", "dagster_plugin", "simulator", "crash")  # folders

pytest_plugins = ["tests.servers.plugin", "tests.workers"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lists",
        choices=["as-they-come", "shuffled"],
        default="as-they-come",
        help="shuffled: storages in memory and in folders list files in random order, as S3 Express does in its own",
    )


@pytest.fixture(autouse=True)
def _lists_as_chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all storages of this process list in random order if the option is set."""
    if request.config.getoption("lists") == "shuffled":
        shuffle_listings(monkeypatch)


@contextmanager
def _fixed_requests() -> Iterator[None]:
    with background.inline(), process_clock.using(TickingClock()):
        yield


@pytest.fixture(scope="module")
def fixed_requests() -> Iterator[None]:
    """Fix the number and order of requests: background work runs inline, and each reading of the clock takes 10 ms.

    For modules that count requests or fail one of them by its number. A version that ``Lakehouse.open`` read is then
    too old to be reused by the next call.
    """
    with _fixed_requests():
        yield


@pytest.fixture
def fixed_requests_of_test() -> Iterator[None]:
    """Fix the number and order of requests as ``fixed_requests`` does, for one test instead of its whole module."""
    with _fixed_requests():
        yield


@pytest.fixture
def manual_clock() -> Iterator[ManualClock]:
    """Advance the process's time only by pauses and by ``advance``."""
    clock = ManualClock()
    with process_clock.using(clock):
        yield clock


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Complete the background work of a test before its fixtures are torn down."""
    background.drain()


@pytest.fixture(autouse=True)
def _clear_caches() -> Iterator[None]:
    """Share no cached files between tests."""
    yield
    clear_process_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that other workers run the rest in parallel."""
    items.sort(
        key=lambda item: next((at for at, name in enumerate(_LONGEST) if name in item.path.parts), len(_LONGEST))
    )


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, and collect less often than by default."""
    # Since Python 3.14 Hypothesis loses random generators of frozen objects, so create its own first.
    settings(max_examples=1, database=None)(given(none())(lambda _: None))()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the recorded texts of tests, whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SHOWN:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
