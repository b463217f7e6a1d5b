"""Settings for all tests."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none

from tests.known_schemas import keep_known_schemas
from tests.unordered import shuffle_lists
from trinitylake_ops.storage import background
from trinitylake_ops.storage.cache.storage import clear_process_caches
from trinitylake_ops.transaction import commit_queue
from trinitylake_ops.versions import roots

# In CI the same examples are tried on every run; elsewhere new ones. Deadlines only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

#: In tests and their fixtures, what is done beside is done at once, so that requests come in one order.
_PUT_BESIDE = background.put
background.put = background.do

keep_known_schemas()

#: A property of a test (``record_property``) whose text is shown when all tests have run.
SHOWN = "shown"

_LONGEST = ("spark", "spark_places", "e2e", "dagster_plugin", "simulator", "crash")  # folders

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
    """Let all storages of this process list in random order where that is asked for."""
    if request.config.getoption("lists") == "shuffled":
        shuffle_lists(monkeypatch)


@pytest.fixture(autouse=True)
def _beside_as_marked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread do what is done beside, in tests of that thread."""
    if request.node.get_closest_marker("beside") is not None:
        monkeypatch.setattr(background, "put", _PUT_BESIDE)


@pytest.fixture(autouse=True)
def _opened_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened or committed is never as good as new, however fast this machine is: but for tests of that."""
    monkeypatch.setattr(roots, "_JUST_NOW_S", 0.0)
    monkeypatch.setattr(commit_queue, "_LONGEST_MOMENT_S", 0.0)


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    """What one test read is no other's."""
    yield
    clear_process_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the other workers have the rest meanwhile."""
    items.sort(
        key=lambda item: next((at for at, name in enumerate(_LONGEST) if name in item.path.parts), len(_LONGEST))
    )


def pytest_collection_finish() -> None:
    """Keep modules and tests, which stay, out of garbage collections, and collect less often than Python does."""
    # Since Python 3.14 Hypothesis takes random numbers that a frozen object holds for lost: it makes its own before.
    settings(max_examples=1, database=None)(given(none())(lambda _: None))()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests want to be seen, whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SHOWN:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
