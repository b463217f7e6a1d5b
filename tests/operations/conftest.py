"""Fixtures that create lakehouses and check them after each test."""

import pytest

from tests.lakes import Lakes, lake, lakes
from tests.operations.aging import Aging, grow

__all__ = ["lake", "lakes"]


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse with six versions, of which all but the latest are old enough to expire."""
    aging_lake = Aging.on(lakes.storage())
    lakes.watch(aging_lake.lake)
    grow(aging_lake, 5)
    aging_lake.later()
    return aging_lake
