"""Settings for all tests."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from trinitylake_ops.storage.cache import clear_process_caches

# In CI the same examples are tried on every run; elsewhere new ones. Deadlines only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

#: A property of a test (``record_property``) whose text is shown when all tests have run.
SHOWN = "shown"

_LONGEST = ("e2e", "dagster_plugin", "simulator")  # folders

pytest_plugins = ["tests.servers.plugin"]


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests want to be seen, whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SHOWN:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(text)
