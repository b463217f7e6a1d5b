"""Fixtures for the end-to-end tests: flights and the deployment."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.browser import Pages
from tests.e2e.topology import RUNNING, Topology, topology
from tests.flights import flights_csv, spark
from tests.operations.changes import create
from trinitylake_ops import Lakehouse

__all__ = ["flights_csv", "spark", "topology"]


@pytest.fixture(scope="session")
def lake(topology: Topology) -> Lakehouse:
    """The lakehouse of the deployment's code location, on S3, with the tables ``a``, ``b`` and ``still`` in namespace
    ``ns``.
    """
    lakehouse = Lakehouse.create(topology.root, topology.server.options_with_credentials)
    create(lakehouse, "ns", "a", "b", "still")
    return lakehouse


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of Dagster's Helm chart unless ``DAGSTER_CHART`` is set."""
    if not os.environ.get("DAGSTER_CHART"):
        deselected = [item for item in items if item.get_closest_marker("dagster_chart")]
        if deselected:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stop the deployment after its last test, because its background work slows down all other tests."""
    is_needed = nextitem is not None and "topology" in getattr(nextitem, "fixturenames", ())
    running = item.config.stash.get(RUNNING, None)
    if running is not None and not is_needed:
        running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Save the browser page of a failed test, and report its path."""
    report: pytest.TestReport = yield
    pages = getattr(item, "funcargs", {}).get("pages")
    if report.failed and isinstance(pages, Pages):
        report.sections.append(("the page in the browser", pages.save_failure(item.name)))
    return report
