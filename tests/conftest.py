"""Settings for all tests."""

import os

import pytest
from hypothesis import settings

# In CI the same examples are tried on every run; elsewhere new ones. Deadlines only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first, so that the other worker has the rest meanwhile."""
    items.sort(key=lambda item: "e2e" not in item.path.parts)
