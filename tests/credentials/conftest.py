"""Fixtures for tests of credentials."""

from collections.abc import Iterator

import pytest

from tests.credentials.server import CanaryServer, canary_server


@pytest.fixture(scope="module")
def canaries(request: pytest.FixtureRequest) -> Iterator[CanaryServer]:
    """A server with unique credentials."""
    yield from canary_server(request.config)
