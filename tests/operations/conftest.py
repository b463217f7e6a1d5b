"""Lakehouses of these tests are checked when they end."""

import pytest

from tests.lakes import Lakes, lake, lakes
from tests.operations.aging import Aging, grow

__all__ = ["lake", "lakes"]


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse of six versions, all of which but the latest are old enough to expire."""
    made = Aging.on(lakes.storage())
    lakes.watch(made.lake)
    grow(made, 5)
    made.later()
    return made
