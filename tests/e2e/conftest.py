"""Fixtures of the flights, and of the deployment, for all tests of this folder."""

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
    """The lakehouse of the deployment's code location, on S3: with namespace ``ns``, tables ``a``, ``b``, ``still``."""
    made = Lakehouse.create(topology.root, topology.server.options_with_credentials)
    create(made, "ns", "a", "b", "still")
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of Dagster's own chart only where somebody names one."""
    if not os.environ.get("DAGSTER_CHART"):
        left_out = [item for item in items if item.get_closest_marker("dagster_chart")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the deployment after its last test: what it does by itself takes time from all others."""
    is_needed = nextitem is not None and "topology" in getattr(nextitem, "fixturenames", ())
    running = item.config.stash.get(RUNNING, None)
    if running is not None and not is_needed:
        running.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep the page on which a test failed, and say where."""
    report: pytest.TestReport = yield
    pages = getattr(item, "funcargs", {}).get("pages")
    if report.failed and isinstance(pages, Pages):
        report.sections.append(("the page in the browser", pages.record(item.name)))
    return report
