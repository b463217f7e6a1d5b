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

pytest_plugins = ["tests.servers.plugin"]


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    """What one test read is no other's."""
    yield
    clear_process_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that the other worker has the rest meanwhile."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)
