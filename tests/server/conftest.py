"""A lakehouse on local disk, and a server for it that runs in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lakes import Lakes, lakes
from tests.server.live_server import LiveServer, serving, settings_for
from trinitylake_ops import Lakehouse

__all__ = ["lakes"]


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    return lakes.local()


@pytest.fixture
def server(lake: Lakehouse) -> Iterator[LiveServer]:
    with serving(settings_for(lake)) as server:
        yield server
