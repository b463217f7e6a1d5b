"""Settings for all tests."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import none
from xdist.scheduler import LoadFileScheduling
from xdist.scheduler.protocol import Scheduling

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
#: Folders and files whose tests share a Spark session: to start one and to warm it up takes longer than most tests.
_ON_SPARK = (
    "tests/spark/",
    "tests/dagster_plugin/test_compaction_jobs.py",
    "tests/dagster_plugin/test_engine.py",
    "tests/dagster_plugin/test_flights_pipeline.py",
    "tests/dagster_plugin/test_io_manager.py",
    "tests/dagster_plugin/test_pipeline_on_s3.py",
    "tests/e2e/test_demo.py",
)
#: Of those files, one whose session is in a process of its own.
_BESIDE_SPARK = "tests/spark/test_java.py"
#: Folders whose tests take long one by one, and share nothing worth waiting for.
_ONE_BY_ONE = ("tests/simulator/", "tests/crash/")
#: Files whose tests share the deployment: to start it takes longer than most of them.
_ON_DEPLOYMENT = "tests/e2e/test_deployed_"

pytest_plugins = ["tests.servers.plugin"]


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
    """Let garbage collections pass over all modules and tests, which stay: some tests ask for many collections."""
    # Since Python 3.14 Hypothesis takes random numbers that a frozen object holds for lost: it makes its own before.
    settings(max_examples=1, database=None)(given(none())(lambda _: None))()
    gc.collect()
    gc.freeze()


class _ByFile(LoadFileScheduling):
    """Each file goes to one worker, all that use Spark, or the deployment, to the same one, some tests each to any."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_ON_SPARK) and not nodeid.startswith(_BESIDE_SPARK):
            return "spark"
        if nodeid.startswith(_ON_DEPLOYMENT):
            return "deployment"
        return nodeid if nodeid.startswith(_ONE_BY_ONE) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Let ``--dist loadfile`` keep what uses Spark together."""
    return _ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests want to be seen, whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SHOWN:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
